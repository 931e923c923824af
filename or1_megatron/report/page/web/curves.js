// Every metric over the steps, runs over another, stages marked.

const STAGES_PX = 20; // above a plot, for the stages' names

const MARKED_SHARE = 0.5; // measured at fewer of the steps than this: points, and no smoothing

/** The overview's charts: metrics that share an axis. */
const OVERVIEW = [
  ["accuracy", ["accuracy/all", "evaluation/accuracy"], "line: training, ○: held-out"],
  ["reward", ["reward/mean"]],
  ["entropy, nats per token", ["entropy/sampled"]],
  ["response length, tokens", ["length/mean", "length/p95"], "line: mean, dashed: 95th percentile"],
  ["truncated responses", ["truncation/ratio"]],
  ["engine against policy, nats per token", ["mismatch/mean_abs"]],
];

/** [{run, colour, name, steps, values}] of these metrics of the runs that are shown. */
function curvesOf(page, names) {
  const found = [];
  page.runs.forEach((run, index) => {
    if (!page.shown.has(index)) return;
    names.forEach((name, place) => {
      const series = run.metrics[name];
      if (!series) return;
      const steps = series[0].map((at) => run.steps[at]);
      found.push({ run, index, name, steps, values: series[1], secondary: place > 0, marked: steps.length < MARKED_SHARE * run.steps.length });
    });
  });
  return found;
}

/** Centred mean over up to `window` points of the same stage; near an end as many on either side. */
function smoothed(curve, window) {
  const starts = curve.run.stages.map((stage) => stage[1]);
  const stageOf = curve.steps.map((step) => starts.filter((start) => start <= step).length);
  return curve.values.map((value, i) => {
    if (value === null) return null;
    let reach = 0;
    const fits = (at) => at >= 0 && at < stageOf.length && stageOf[at] === stageOf[i] && curve.values[at] !== null;
    while (reach < (window >> 1) && fits(i - reach - 1) && fits(i + reach + 1)) reach++;
    let sum = 0;
    for (let at = i - reach; at <= i + reach; at++) sum += curve.values[at];
    return sum / (2 * reach + 1);
  });
}

function extent(curves, level) {
  let [low, high] = [Infinity, -Infinity];
  for (const curve of curves) for (const value of curve.values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (level !== null && Number.isFinite(low)) [low, high] = [Math.min(low, level), Math.max(high, level)];
  return [low, high];
}

function drawCurves(page, names, width, height, level = null) {
  const curves = curvesOf(page, names);
  const [least, most] = extent(curves, level);
  if (!curves.length || !Number.isFinite(least)) return el("p", { class: "note" }, curves.length ? "never finite" : "not measured by the runs shown");
  const log = page.log && least > 0 && most / least >= 10;
  let [low, high] = [least, most];
  if (log) [low, high] = [low * 0.9, high * 1.1];
  else {
    if (low > 0 && low < 0.4 * high) low = 0;
    const pad = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.1 || 0.5;
    high += pad;
    if (low !== 0) low -= pad;
  }
  const steps = curves.flatMap((curve) => [curve.steps[0], curve.steps[curve.steps.length - 1]]);
  let x = [Math.min(...steps), Math.max(...steps)];
  if (x[0] === x[1]) x = [x[0] - 1, x[1] + 1];
  const plot = frame({ width, height, x, y: [low, high], log, whole: true, top: STAGES_PX });
  drawStages(page, plot, x);
  if (level !== null) {
    const at = plot.up(level);
    plot.layer.append(svg("line", { x1: plot.inner.left, x2: plot.inner.right, y1: at, y2: at, stroke: "var(--soft)", "stroke-dasharray": "6 4" }));
  }
  for (const curve of curves) drawCurve(page, plot, curve);
  follow(plot, curves);
  return plot.root;
}

function drawCurve(page, plot, curve) {
  const colour = colourOf(curve.index);
  const dashes = curve.secondary && !curve.marked ? "5 3" : curve.index >= 8 ? "8 3" : "none";
  const line = (values, extra) => {
    const pieces = thin(curve.steps, values, plot).map((piece) => piece.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`));
    for (const piece of pieces) {
      if (piece.length > 1) plot.layer.append(svg("polyline", { points: piece.join(" "), fill: "none", stroke: colour, "stroke-linejoin": "round", "stroke-dasharray": dashes, ...extra }));
      else if (!curve.marked) plot.layer.append(svg("circle", { cx: piece[0].split(",")[0], cy: piece[0].split(",")[1], r: 2.2, fill: colour }));
    }
  };
  const smooth = page.window > 1 && !curve.marked && curve.values.length > 4;
  line(curve.values, { "stroke-width": smooth ? 1 : 1.6, "stroke-opacity": smooth ? 0.35 : 1 });
  if (smooth) line(smoothed(curve, page.window), { "stroke-width": 2 });
  curve.values.forEach((value, i) => {
    const at = plot.across(curve.steps[i]);
    if (value === null) plot.layer.append(cross(at, plot.inner.top + 4, colour));
    else if (curve.marked) plot.layer.append(svg("circle", { cx: at, cy: plot.up(value), r: 3, fill: curve.secondary ? "var(--ground)" : colour, stroke: colour, "stroke-width": 1.6 }));
  });
}

/** Where a value was not finite. */
function cross(x, y, colour) {
  return svg("path", { d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`, stroke: colour, "stroke-width": 1.6 });
}

/** Runs of neighbouring finite points on the screen; of many points per pixel the lowest and the highest. */
function thin(steps, values, plot) {
  const pieces = [];
  let piece = [];
  const perPixel = values.length > 2 * (plot.inner.right - plot.inner.left);
  let pixel = null;
  let [least, most] = [null, null];
  const flush = () => {
    if (least) piece.push(...(least === most ? [least] : least[0] <= most[0] ? [least, most] : [most, least]));
    [least, most] = [null, null];
  };
  const end = () => {
    flush();
    if (piece.length) pieces.push(piece);
    piece = [];
    pixel = null;
  };
  values.forEach((value, i) => {
    if (value === null) return end();
    const point = [plot.across(steps[i]), plot.up(value)];
    if (!perPixel) return piece.push(point);
    if (Math.floor(point[0]) !== pixel) flush();
    pixel = Math.floor(point[0]);
    if (!least || point[1] > least[1]) least = point;
    if (!most || point[1] < most[1]) most = point;
  });
  end();
  return pieces;
}

/** A dashed line where a stage begins; its name where there is room and runs agree on it. */
function drawStages(page, plot, x) {
  const at = new Map();
  page.runs.forEach((run, index) => {
    if (!page.shown.has(index)) return;
    run.stages.slice(1).forEach(([name, first]) => {
      const known = at.get(first) ?? { names: new Set(), runs: [] };
      known.names.add(name);
      known.runs.push(index);
      at.set(first, known);
    });
  });
  let free = plot.inner.left;
  for (const [first, { names, runs }] of [...at].sort((a, b) => a[0] - b[0])) {
    if (first - 0.5 <= x[0] || first - 0.5 > x[1]) continue;
    const place = plot.across(first - 0.5);
    const common = runs.length === page.shown.size;
    plot.layer.append(svg("line", { x1: place, x2: place, y1: plot.inner.top - 17, y2: plot.inner.bottom, stroke: common ? "var(--soft)" : colourOf(runs[0]), "stroke-dasharray": "2 3" }));
    const name = [...names].join(", ");
    if (place < free || place + 4 + 6.5 * name.length > plot.inner.right) continue;
    const label = svg("text", { x: place + 4, y: plot.inner.top - 6, class: "soft" });
    label.textContent = name;
    plot.layer.append(label);
    free = place + 6.5 * name.length + 10;
  }
}

/** The values at the step under the pointer. */
function follow(plot, curves) {
  const all = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const rule = svg("line", { y1: plot.inner.top, y2: plot.inner.bottom, stroke: "var(--soft)", visibility: "hidden" });
  plot.layer.append(rule);
  plot.root.addEventListener("pointermove", (event) => {
    const box = plot.root.getBoundingClientRect();
    const wanted = event.clientX - box.left;
    const step = all.reduce((best, each) => (Math.abs(plot.across(each) - wanted) < Math.abs(plot.across(best) - wanted) ? each : best));
    const lines = curves.flatMap((curve) => {
      const at = curve.steps.indexOf(step);
      if (at < 0) return [];
      const value = curve.values[at];
      return [`${curve.run.label}${curves.some((other) => other.name !== curve.name) ? `, ${curve.name}` : ""}: ${value === null ? "not finite" : number(value)}`];
    });
    rule.setAttribute("x1", plot.across(step));
    rule.setAttribute("x2", plot.across(step));
    rule.setAttribute("visibility", "visible");
    const stage = curves[0].run.stages.filter((each) => each[1] <= step).pop();
    tip.show(event, `step ${step}${stage ? ` (${stage[0]})` : ""}\n${lines.join("\n")}`);
  });
  plot.root.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    tip.hide();
  });
}

function chart(page, title, unit, meaning, names, height, level = null) {
  const heading = el("header", {}, title, el("span", {}, unit));
  if (meaning) hint(heading, meaning);
  const plot = lazily(el("div", { class: "plot" }), (width) => drawCurves(page, names, width, height, level));
  page.redraws.push(plot);
  return el("div", { class: "chart", "data-metric": names[0] }, heading, plot);
}

function curveControls(page) {
  const redraw = () => page.redraws.forEach((plot) => plot.redraw());
  const window = el("select", { "aria-label": "smoothing", onchange: (event) => { page.window = Number(event.target.value); redraw(); } });
  for (const [value, text] of [[1, "none"], [5, "5 steps"], [9, "9 steps"], [25, "25 steps"]]) window.append(el("option", { value, selected: value === page.window }, text));
  const log = el("input", { type: "checkbox", onchange: (event) => { page.log = event.target.checked; redraw(); } });
  return el("div", { class: "controls" }, el("label", {}, "smoothing", window), el("label", {}, log, "logarithmic where it spans a power of ten"));
}

function overviewTab(page) {
  const known = new Set(page.metrics.map((metric) => metric[0]));
  const grid = el("div", { class: "grid large" });
  for (const [title, names, captions] of OVERVIEW) {
    const there = names.filter((name) => known.has(name));
    if (!there.length) continue;
    const targets = [...new Set(page.runs.map((run) => run.entropy_target))];
    const level = title.startsWith("entropy") && targets.length === 1 ? targets[0] : null;
    const keys = level === null ? there.length > 1 ? captions : "" : `dashed: target ${number(level)}`;
    grid.append(chart(page, title, keys, there.join(", "), there, 240, level));
  }
  if (!grid.children.length) return [el("p", { class: "note" }, "No metrics are recorded: there is nothing to draw.")];
  return [curveControls(page), summaryTable(page), grid];
}

/** What the runs came to. */
function summaryTable(page) {
  const table = el("table", {}, el("tr", {}, ...["run", "steps", "accuracy before", "after", "time", "other share"].map((text, i) => el("th", { class: i ? "n" : null }, text))));
  for (const run of page.runs) {
    const told = run.summary;
    const steps = run.steps.length ? run.steps[run.steps.length - 1] : 0;
    const cells = [count(steps) + (told.total_steps ? ` of ${count(told.total_steps)}` : ""), percent(told.accuracy_before), percent(told.accuracy_after), duration(told.wall_s), percent(told.other_share)];
    table.append(el("tr", {}, el("td", {}, run.label), ...cells.map((text) => el("td", { class: "n" }, text))));
  }
  return el("div", { class: "wide" }, table);
}

/** [title, metrics] of the groups; neighbours too small for a section of their own share one. */
function gathered(groups) {
  const found = [];
  for (const [group, metrics] of groups) {
    const last = found[found.length - 1];
    if (last && metrics.length < 3 && last[1].length < 6) found[found.length - 1] = [`${last[0]}, ${group}`, [...last[1], ...metrics]];
    else found.push([group, metrics]);
  }
  return found;
}

function metricsTab(page) {
  const groups = new Map();
  for (const metric of page.metrics) {
    const group = metric[0].includes("/") ? metric[0].split("/")[0] : "whole step";
    groups.set(group, [...(groups.get(group) ?? []), metric]);
  }
  const find = el("input", { type: "text", placeholder: "part of a name", "aria-label": "metrics whose name holds" });
  const sections = gathered(groups).map(([group, metrics]) => {
    const grid = el("div", { class: "grid" }, ...metrics.map(([name, unit, meaning]) => chart(page, name, unit, meaning, [name], 168)));
    return el("section", {}, el("h2", {}, group), grid);
  });
  find.addEventListener("input", () => {
    for (const section of sections) {
      const charts = [...section.querySelectorAll(".chart")];
      for (const each of charts) each.hidden = !each.dataset.metric.includes(find.value.trim());
      section.hidden = charts.every((each) => each.hidden);
    }
  });
  const controls = curveControls(page);
  controls.prepend(el("label", {}, "find", find));
  return [controls, ...sections];
}
