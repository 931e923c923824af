// Makes HTML elements and the tooltip.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const colourOf = (index) => `var(--c${index % 8})`;

const tip = {
  /** Show plain text at the pointer, inside the window. */
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const beyond = event.clientX + 16 + width > innerWidth;
    box.style.left = `${Math.max(4, beyond ? event.clientX - width - 12 : event.clientX + 16)}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

/** Show `text` while the pointer is over `node`. */
function hint(node, text) {
  node.addEventListener("pointermove", (event) => tip.show(event, text));
  node.addEventListener("pointerleave", tip.hide);
}
