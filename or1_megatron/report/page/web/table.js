// A table of any number of rows; only those in view are in the document.

const ROW_PX = 28;
const MARGIN_ROWS = 12;

/**
 * columns: [{title, hint, width, number, sortable, text(row), order(row), tone(row)}]; `width` in px; `row` is an index.
 * Returns {root, show(rows), chosen(row)}; `onchoose(row)` is called by click and by the arrow keys.
 */
function virtualTable(columns, onchoose) {
  const template = columns.map((column) => `${column.width}px`).join(" ");
  const width = columns.reduce((sum, column) => sum + column.width, 0);
  let rows = new Uint32Array(0);
  let chosen = -1;
  let sorted = { column: null, down: false };

  const window_ = el("div", { class: "rows", role: "rowgroup" });
  const head = el("div", { class: "head", role: "row", style: `grid-template-columns:${template};width:${width}px` });
  const sheet = el("div", { class: "sheet", style: `width:${width}px` }, head, window_);
  const root = el("div", { class: "scroller", tabindex: 0, role: "grid", "aria-label": "responses" }, sheet);

  for (const column of columns) {
    const button = el("button", { type: "button", class: column.number ? "n" : null, role: "columnheader", title: column.hint ?? "", onclick: () => sort(column) }, column.title);
    column.button = button;
    head.append(button);
  }

  function sort(column) {
    sorted = { column, down: sorted.column === column ? !sorted.down : Boolean(column.number) };
    for (const each of columns) each.button.textContent = each.title + (each === column ? (sorted.down ? " ↓" : " ↑") : "");
    arrange();
    root.scrollTop = 0;
    draw(true);
  }

  /** Sort the rows. Ties stay in the order of the run; rows without a number come last in both directions. */
  function arrange() {
    const { column, down } = sorted;
    if (!column) return;
    const keys = new Map();
    for (const row of rows) keys.set(row, column.order(row));
    const lacks = (key) => key === null || Number.isNaN(key);
    rows.sort((a, b) => {
      const [p, q] = [keys.get(a), keys.get(b)];
      if (lacks(p) || lacks(q)) return lacks(p) - lacks(q) || a - b;
      if (p === q) return a - b;
      return (p < q) !== down ? -1 : 1;
    });
  }

  let drawn = "";
  function draw(anew = false) {
    const first = Math.max(0, Math.floor(root.scrollTop / ROW_PX) - MARGIN_ROWS);
    const last = Math.min(rows.length, Math.ceil((root.scrollTop + root.clientHeight) / ROW_PX) + MARGIN_ROWS);
    if (!anew && drawn === `${first}-${last}`) return;
    drawn = `${first}-${last}`;
    const made = document.createDocumentFragment();
    for (let place = first; place < last; place++) made.append(line(rows[place], place));
    window_.replaceChildren(made);
    window_.style.transform = `translateY(${first * ROW_PX}px)`;
  }

  function line(row, place) {
    const node = el("div", { class: row === chosen ? "row chosen" : "row", role: "row", "aria-rowindex": place + 2, "data-row": row, style: `grid-template-columns:${template}` });
    for (const column of columns) {
      const cell = document.createElement("span");
      cell.textContent = column.text(row);
      cell.className = `${column.number ? "n" : ""} ${column.tone ? column.tone(row) : ""}`;
      node.append(cell);
    }
    return node;
  }

  let asked = false;
  root.addEventListener("scroll", () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  }, { passive: true });
  new ResizeObserver(() => draw()).observe(root);
  window_.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.row));
  });
  root.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!move || !rows.length) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(rows.length - 1, rows.indexOf(chosen) + move));
    choose(rows[place]);
    reveal(place);
  });

  function reveal(place) {
    const [top, bottom] = [place * ROW_PX, (place + 2) * ROW_PX];
    if (top < root.scrollTop) root.scrollTop = top;
    else if (bottom > root.scrollTop + root.clientHeight) root.scrollTop = bottom - root.clientHeight;
  }

  function choose(row) {
    chosen = row;
    draw(true);
    onchoose(row);
  }

  return {
    root,
    show(list) {
      rows = list;
      arrange();
      sheet.style.height = `${(rows.length + 1) * ROW_PX}px`;
      root.setAttribute("aria-rowcount", rows.length + 1);
      root.scrollTop = 0;
      draw(true);
    },
    choose(row) {
      const place = rows.indexOf(row);
      choose(row);
      if (place >= 0) reveal(place);
    },
    width,
  };
}
