// Draws charts with uPlot (vendor/uplot) in the page's colours.

const WHOLE = Array.from({ length: 27 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // steps between ticks
const PARTS = WHOLE.map((step) => step / 1e4);

/** The value of a colour such as var(--c0), since a canvas knows no variables. */
const ink = (colour) => colour.replace(/var\((--\w+)\)/, (_, name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim());

/** Call `make(host, width)` when `host` comes into view, when its width or the colours change, and on `host.redraw()`. */
function lazily(host, make) {
  let drawn = 0;
  let inView = false;
  const draw = () => {
    const width = Math.floor(host.clientWidth);
    if (!inView || !width || width === drawn) return;
    drawn = width;
    host.chart?.destroy();
    host.chart = null;
    host.replaceChildren();
    make(host, width);
  };
  host.redraw = () => {
    drawn = 0;
    draw();
  };
  new IntersectionObserver((entries) => {
    inView = entries.some((entry) => entry.isIntersecting);
    draw();
  }, { rootMargin: "200px" }).observe(host);
  new ResizeObserver(draw).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", host.redraw);
  return host;
}

/**
 * Draw a chart into `host`. `data`: [x, then the values of each of `series`], both as uPlot takes them, with CSS colours.
 * x, y: uPlot's scales; xText, yText: (value, step between ticks) => label; marks: see drawMarks; tell(i): the tooltip at
 * data[0][i]; room: px above the plot; incrs: steps between the ticks of x; zoom: whether dragging zooms in and a double click zooms out.
 */
function chart(host, { width, height, data, series, x = {}, y = {}, xText = tickText, yText = tickText, marks = [], tell, room = 10, zoom = false, incrs = WHOLE }) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = (text, more) => ({
    stroke: ink("var(--soft)"), font, ticks: { show: false }, grid: { stroke: ink("var(--line)"), width: 1, filter: (plot, splits, place, ...more) => plot.axes[place].filter(plot, splits, place, ...more) },
    values: (_, splits, axisIndex, space, step) => splits.map((value) => (value === null ? "" : text(value, step))), ...more,
  });
  const coloured = ({ stroke, fill, points, ...more }) => ({
    ...more, stroke: stroke && ink(stroke), fill: fill && ink(fill), points: { show: false, ...points, fill: points?.fill && ink(points.fill) },
  });
  const told = ({ cursor }) => (cursor.idx === null || cursor.left < 0 ? tip.hide() : tip.show(cursor.event, tell(cursor.idx)));
  const snapped = (plot, left, top) => [left < 0 || !zoom ? left : plot.valToPos(plot.data[0][plot.posToIdx(left)], "x"), top];
  host.chart = new uPlot({
    width, height, padding: [room, 10, 0, 0], legend: { show: false },
    scales: { x: { time: false, ...x }, y },
    axes: [axis(xText, { size: 24, space: 60, incrs, grid: { show: false } }), axis(yText, { size: 50, space: 38 })],
    series: [{}, ...series.map(coloured)],
    cursor: { x: zoom, y: false, points: { show: false }, drag: { x: zoom, y: false }, move: snapped },
    hooks: { draw: [(plot) => drawMarks(plot, marks)], setCursor: [told] },
  }, data, host);
}

/** Lay `marks` [{kind: CSS class, text, x, y (null: at the top), colour}] over a plot; a stage's name ends at the next. */
function drawMarks(plot, marks) {
  for (const old of plot.over.querySelectorAll(".mark")) old.remove();
  const width = plot.over.clientWidth;
  let free = width;
  for (const { kind, text, x, y = null, colour } of [...marks].sort((a, b) => b.x - a.x)) {
    const left = plot.valToPos(x, "x");
    if (left < 0 || left > width) continue;
    const top = y === null ? "" : `top:${plot.valToPos(y, "y")}px`;
    plot.over.append(el("i", { class: `mark ${kind}`, style: `left:${left}px;max-width:${free - left}px;--mark:${colour};${top}` }, text));
    if (kind === "stage") free = left;
  }
}

/** Draw bars of `layers` [{colour, values}] on top of one another, the first at the bottom, at each of `places`. */
function stackedBars(host, places, layers, options) {
  const tops = [places.map(() => 0)];
  for (const { values } of layers) tops.push(values.map((value, i) => tops.at(-1)[i] + value));
  const gap = options.width / places.length > 5 ? 1 : 0;
  const series = layers.map(({ colour }, layer) => {
    const ends = { y0: { unit: 1, values: () => tops[layer] }, y1: { unit: 1, values: () => tops[layer + 1] } };
    return { fill: colour, width: 0, paths: uPlot.paths.bars({ size: [1, Infinity], gap, disp: ends }) };
  });
  chart(host, { ...options, data: [places, ...tops.slice(1)], series });
}
