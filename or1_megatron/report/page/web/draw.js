// Elements, axes and the one tooltip.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const colourOf = (index) => `var(--c${index % 8})`;

/** Round numbers within [low, high], about `wanted` of them. */
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((size) => size * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { values: found, step };
}

/**
 * A plot's frame. `x`, `y`: [low, high] of the data; `log`: y by powers of ten; `whole`: x has whole numbers only.
 * Returns {root, layer, across, up, inner}.
 */
function frame({ width, height, x, y, log = false, whole = false, yText = null, xText = null, left = 50, top = 10 }) {
  const inner = { left, right: width - 10, top, bottom: height - 22 };
  const scale = log ? Math.log10 : (value) => value;
  const [low, high] = [scale(y[0]), scale(y[1])];
  const across = (value) => inner.left + ((value - x[0]) / (x[1] - x[0] || 1)) * (inner.right - inner.left);
  const up = (value) => inner.bottom - ((scale(value) - low) / (high - low || 1)) * (inner.bottom - inner.top);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const back = svg("g");
  const marks = log ? powers(y[0], y[1]) : ticks(y[0], y[1], Math.max(2, (inner.bottom - inner.top) / 38));
  for (const value of marks.values) {
    const at = up(value);
    back.append(svg("line", { x1: inner.left, x2: inner.right, y1: at, y2: at, stroke: "var(--line)" }));
    const label = svg("text", { x: inner.left - 6, y: at + 4, "text-anchor": "end", class: "soft" });
    label.textContent = yText ? yText(value) : tickText(value, marks.step);
    back.append(label);
  }
  const steps = ticks(x[0], x[1], Math.max(2, (inner.right - inner.left) / 70));
  for (const value of steps.values) {
    if (whole && value !== Math.round(value)) continue;
    const at = across(value);
    const label = svg("text", { x: Math.min(at, inner.right - 4), y: height - 6, "text-anchor": "middle", class: "soft" });
    label.textContent = xText ? xText(value) : tickText(value, steps.step);
    back.append(label);
  }
  const layer = svg("g");
  root.append(back, layer);
  return { root, layer, across, up, inner };
}

function powers(low, high) {
  const values = [];
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first + 1) / 6));
  for (let power = first; power <= last; power += every) values.push(10 ** power);
  return { values, step: Math.abs(values[0] ?? 1) };
}

const tip = {
  /** Plain text at the pointer, kept inside the window. */
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

/** Draws `make(width)` into `host` when it comes into view, and again when its width changes or `host.redraw()` is called. */
function lazily(host, make) {
  let drawn = 0;
  let inView = false;
  host.redraw = () => {
    drawn = 0;
    if (inView) draw();
  };
  const draw = () => {
    const width = Math.floor(host.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    host.replaceChildren(make(width));
  };
  new IntersectionObserver((entries) => {
    inView = entries.some((entry) => entry.isIntersecting);
    if (inView) draw();
  }, { rootMargin: "200px" }).observe(host);
  new ResizeObserver(() => inView && draw()).observe(host);
  return host;
}

/** An SVG button-like bar chart element with its tooltip. */
function hint(node, text) {
  node.addEventListener("pointermove", (event) => tip.show(event, typeof text === "function" ? text(event) : text));
  node.addEventListener("pointerleave", tip.hide);
  return node;
}
