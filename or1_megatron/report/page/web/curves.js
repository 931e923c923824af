// Every metric over the steps, with all runs in one chart and their stages marked.

const STAGES_PX = 20; // above a plot, for the stages' names
const MARKED_SHARE = 0.5; // a metric measured at a smaller share of the steps has points and no smoothing

/** The overview's charts: metrics that share an axis. */
const OVERVIEW = [
  ["accuracy", ["accuracy/all", "evaluation/accuracy"], "line: training, ○: held-out"],
  ["reward", ["reward/mean", "reward/min", "reward/max"], "line: mean, dashed: lowest and highest"],
  ["spread of the reward", ["reward/std"]],
  ["held-out: one of k right", /^evaluation\/pass@/],
  ["held-out: best reward of k", /^evaluation\/best@/],
  ["held-out accuracy by source", /^evaluation\/source\//],
  ["entropy, nats per token", ["entropy/sampled"]],
  ["response length, tokens", ["length/mean", "length/p95"], "line: mean, dashed: 95th percentile"],
  ["truncated responses", ["truncation/ratio"]],
  ["engine against policy, nats per token", ["mismatch/mean_abs"]],
  ["engines' use, share of the step", ["engine/utilization", "engine/balance"], "line: decoding, dashed: balance"],
  ["memory in use, bytes", ["memory/host", "memory/gpu"], "line: host, dashed: GPU"],
];

const AXES = { step: "steps", tokens: "response tokens", hours: "hours" };

/** Return {axis: place of each of the run's steps at its end}; an axis that the run has not measured is left out. */
function axesOf(run) {
  const summed = (name, unit) => {
    if (!run.metrics[name]) return null;
    const found = new Array(run.steps.length).fill(0);
    run.metrics[name][0].forEach((at, i) => { found[at] = (run.metrics[name][1][i] ?? 0) / unit; });
    let sum = 0;
    return found.map((value) => (sum += value));
  };
  return { step: run.steps, tokens: summed("rollout/response_tokens", 1), hours: summed("time/step", 3600) };
}

/** Return where on the axis the run had ended the steps before `step`. */
function beginning(run, axis, step) {
  if (axis === "step") return step - 0.5;
  const before = run.steps.findLastIndex((each) => each < step);
  return before < 0 ? 0 : run.axes[axis][before];
}

/** Return [{run, index, colour, name, steps, places, values, secondary, marked}] for these metrics of the runs shown. */
function curvesOf(page, names) {
  const found = [];
  page.runs.forEach((run, index) => {
    if (!page.shown.has(index)) return;
    names.forEach((name, place) => {
      const series = run.metrics[name];
      if (!series || !run.axes[page.axis]) return;
      const steps = series[0].map((at) => run.steps[at]);
      const marked = (series[2] ?? steps.length) < MARKED_SHARE * run.steps.length;
      const apart = names.apart && page.runs.length === 1;
      found.push({ run, index, name, steps, values: series[1], places: series[0].map((at) => run.axes[page.axis][at]), colour: names.colours?.[place] ?? colourOf(apart ? place : index), secondary: names.colours ? index > 0 : place > 0 && !apart, marked });
    });
  });
  return found;
}

/** Return the centred mean over up to `window` points of the same stage, fewer near its ends. */
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

/** Return [low, high] of an axis for values from `least` to `most`. */
function around(least, most, log) {
  if (least === null) return [0, 1]; // nothing is in view
  if (log) return [least * 0.9, most * 1.1];
  const low = least > 0 && least < 0.4 * most ? 0 : least;
  const pad = most > low ? 0.04 * (most - low) : Math.abs(most) * 0.1 || 0.5;
  return [low === 0 ? 0 : low - pad, most + pad];
}

function drawCurves(page, names, host, width, height, level) {
  const curves = curvesOf(page, names);
  const finite = curves.flatMap((curve) => curve.values).filter((value) => value !== null);
  if (!finite.length) return host.append(el("p", { class: "note" }, curves.length ? "never finite" : "not measured by the runs shown"));
  if (level !== null) finite.push(level);
  const [least, most] = [Math.min, Math.max].map((either) => finite.reduce((a, b) => either(a, b)));
  const log = page.log && least > 0 && most / least >= 10;
  const lines = curves.flatMap((curve) => linesOf(curve, page.window));
  if (level !== null) {
    const ends = [Math.min, Math.max].map((either) => curves.flatMap((curve) => [curve.places[0], curve.places.at(-1)]).reduce((a, b) => either(a, b)));
    lines.push({ places: ends, values: [level, level], stroke: "var(--soft)", width: 1, dash: [6, 4] });
  }
  const crosses = curves.flatMap((curve) => curve.places.filter((_, i) => curve.values[i] === null).map((x) => ({ kind: "cross", text: "✕", x, colour: curve.colour })));
  const alarms = alarmMarks(page, names);
  const data = uPlot.join(lines.map(({ places, values }) => [places, values]));
  chart(host, {
    width, height, data, series: lines.map(({ places, values, ...line }) => line), incrs: page.axis === "hours" ? PARTS : WHOLE, room: STAGES_PX, zoom: true,
    y: { distr: log ? 3 : 1, range: (_, low, high) => around(low, high, log) },
    yText: (value, step) => tickText(value, log ? value : step),
    marks: [...stageMarks(page.runs, page.shown, page.axis), ...crosses, ...alarms],
    tell: (i) => [valuesAt(curves, page.axis, data[0][i]), ...alarms.filter(({ x }) => x === data[0][i]).map(({ sentence }) => `▼ ${sentence}`)].join("\n"),
  });
}

/** Return the lines of a curve, [{places, values, and options of uPlot}]: itself, and its smoothed values. */
function linesOf(curve, window) {
  const { places, values, marked, colour: stroke } = curve;
  const dash = curve.secondary && !marked ? [5, 3] : curve.index >= 8 ? [8, 3] : [];
  const lacks = (i) => (values[i] ?? null) === null;
  const lone = places.filter((_, i) => !lacks(i) && lacks(i - 1) && lacks(i + 1)); // no line leads to them
  const points = marked
    ? { show: true, size: 7.5, width: 1.6, fill: curve.secondary ? "var(--ground)" : stroke }
    : { show: true, size: 4.5, fill: stroke, filter: (plot) => lone.map((place) => plot.data[0].indexOf(place)) };
  const smooth = window > 1 && !marked && values.length > 4;
  const line = { places, values, stroke, dash, points, width: smooth ? 1 : 1.6, alpha: smooth ? 0.35 : 1 };
  return smooth ? [line, { places, values: smoothed(curve, window), stroke, dash, width: 2, auto: false }] : [line];
}

/** Return a mark for each beginning of a stage, in the colour of its run unless all runs shown agree. */
function stageMarks(runs, shown, axis = "step") {
  const at = new Map();
  runs.forEach((run, index) => {
    if (!shown.has(index) || !run.axes[axis]) return;
    run.stages.slice(1).forEach(([name, first]) => {
      const place = beginning(run, axis, first);
      const known = at.get(place) ?? { names: new Set(), runs: [] };
      known.names.add(name);
      known.runs.push(index);
      at.set(place, known);
    });
  });
  return [...at].map(([place, found]) => ({
    kind: "stage", x: place, text: [...found.names].join(", "),
    colour: found.runs.length === shown.size ? "var(--soft)" : colourOf(found.runs[0]),
  }));
}

/** Return the values of the curves at a place of the axis, as text. */
function valuesAt(curves, axis, place) {
  const there = curves.find((curve) => curve.places.includes(place));
  const step = there.steps[there.places.indexOf(place)];
  const several = curves.some((curve) => curve.name !== curves[0].name);
  const lines = curves.flatMap((curve) => {
    const value = curve.values[curve.places.indexOf(place)];
    return value === undefined ? [] : [`${curve.run.label}${several ? `, ${curve.name}` : ""}: ${value === null ? "not finite" : number(value)}`];
  });
  const stage = there.run.stages.findLast((each) => each[1] <= step);
  const also = axis === "step" ? "" : `, ${number(place)} ${AXES[axis]}`;
  return [`step ${step}${also}${stage ? ` (${stage[0]})` : ""}`, ...lines].join("\n");
}

function curveChart(page, title, unit, meaning, names, height, level = null) {
  const heading = el("header", {}, title, el("span", {}, unit));
  if (meaning) hint(heading, meaning);
  const plot = lazily(el("div", { class: "plot" }), (host, width) => drawCurves(page, names, host, width, height, level));
  page.redraws.push(plot);
  return el("div", { class: "chart", "data-metric": names[0] }, heading, plot);
}

function curveControls(page) {
  const redraw = () => page.redraws.forEach((plot) => plot.redraw());
  const window = el("select", { "aria-label": "smoothing", onchange: (event) => { page.window = Number(event.target.value); redraw(); } });
  for (const [value, text] of [[1, "none"], [5, "5 steps"], [9, "9 steps"], [25, "25 steps"]]) window.append(el("option", { value, selected: value === page.window }, text));
  const log = el("input", { type: "checkbox", onchange: (event) => { page.log = event.target.checked; redraw(); } });
  const axis = el("select", { "aria-label": "axis", onchange: (event) => { page.axis = event.target.value; redraw(); } });
  for (const [value, text] of Object.entries(AXES)) if (page.runs.some((run) => run.axes[value])) axis.append(el("option", { value, selected: value === page.axis }, text));
  return el("div", { class: "controls" }, el("label", {}, "over", axis), el("label", {}, "smoothing", window), el("label", {}, log, "logarithmic where it spans a power of ten"));
}

function entropyTarget(config) {
  const entropy = config.algorithm?.entropy;
  return entropy?.mode === "adaptive" ? entropy.target : null;
}

function overviewTab(page) {
  const known = new Set(page.metrics.map((metric) => metric[0]));
  const grid = el("div", { class: "grid large" });
  for (const [title, names, captions] of OVERVIEW) {
    const there = names instanceof RegExp ? [...known].filter((name) => names.test(name)).sort((a, b) => a.localeCompare(b, "en", { numeric: true })) : names.filter((name) => known.has(name));
    if (!there.length) continue;
    there.apart = names instanceof RegExp; // each has a colour of its own where there is one run
    const targets = [...new Set(page.runs.map((run) => entropyTarget(run.config)))];
    const level = title.startsWith("entropy") && targets.length === 1 ? targets[0] : null;
    const own = there.map((name, i) => el("i", { style: page.runs.length === 1 ? `color:${colourOf(i)}` : null }, `${name.split("/").slice(1).join("/").replace(/^source\/|\/accuracy$/g, "")} `));
    const keys = there.apart ? el("span", {}, ...own) : level !== null ? `dashed: target ${number(level)}` : there.length > 1 ? captions : "";
    grid.append(curveChart(page, title, keys, there.join(", "), there, 240, level));
  }
  if (!grid.children.length) return [el("p", { class: "note" }, "No metrics are recorded: there is nothing to draw.")];
  return [curveControls(page), current(page, () => summaryTable(page)), current(page, () => eventsTable(page)), grid];
}

/** Return a table of the runs' outcomes. */
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

/** Return a table of alarms, and of processes that died and were replaced. */
function eventsTable(page) {
  const events = page.runs.flatMap((run) => {
    const faults = run.faults.map(([kind, who, why, time]) => [new Date(1000 * time).toLocaleString("sv"), `${kind}: ${who}`, why]);
    const alarms = alarmsOf(page, run).map(({ step, text }) => [`step ${step}`, text, ""]);
    return [...alarms, ...faults].map((event) => (page.runs.length > 1 ? [run.label, ...event] : event));
  });
  const rows = events.map((event) => el("tr", {}, ...event.map((text) => el("td", {}, text))));
  return el("details", { hidden: !events.length, open: events.length <= 5, class: "wide" }, el("summary", {}, `Alarms, failures and restarts: ${count(events.length)}`), el("table", {}, ...rows));
}

/** Return [title, metrics] of each section; small neighbouring groups share one. */
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
    const grid = el("div", { class: "grid" }, ...metrics.map(([name, unit, meaning]) => curveChart(page, name, unit, meaning, [name], 168)));
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
