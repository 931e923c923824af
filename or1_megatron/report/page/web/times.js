// The time of each step: a bar with its verbs stacked, and a table of the sums.

const VERBS_APART = 7;

/** Return {verb: seconds over all steps} of a run, the longest first. */
function verbTotals(run) {
  const totals = {};
  for (const [name, [, values]] of Object.entries(run.metrics)) {
    if (!name.startsWith("time/") || name === "time/step" || name === "time/other") continue;
    totals[name.slice(5)] = values.reduce((sum, value) => sum + (value ?? 0), 0);
  }
  return Object.fromEntries(Object.entries(totals).sort((a, b) => b[1] - a[1]));
}

/** Return the verbs of all runs that get a colour of their own; the others share one. */
function verbsApart(page) {
  const totals = {};
  for (const run of page.runs) for (const [verb, seconds] of Object.entries(verbTotals(run))) totals[verb] = (totals[verb] ?? 0) + seconds;
  return Object.entries(totals).sort((a, b) => b[1] - a[1]).slice(0, VERBS_APART).map(([verb]) => verb);
}

/** Return at most `most` bars of equally many steps, [{first, last, parts: [seconds per step of each of `apart`, of the rest]}]. */
function timeBars(run, apart, most) {
  const per = Math.max(1, Math.ceil(run.steps.length / most));
  const bars = [];
  for (let at = 0; at < run.steps.length; at += per) {
    const last = Math.min(at + per, run.steps.length) - 1;
    bars.push({ first: run.steps[at], last: run.steps[last], steps: last - at + 1, parts: new Array(apart.length + 1).fill(0) });
  }
  for (const verb of Object.keys(verbTotals(run))) {
    const [places, values] = run.metrics[`time/${verb}`];
    const part = apart.includes(verb) ? apart.indexOf(verb) : apart.length;
    places.forEach((place, i) => {
      const bar = bars[Math.floor(place / per)];
      bar.parts[part] += (values[i] ?? 0) / bar.steps;
    });
  }
  return bars;
}

function drawTimes(page, run, apart, host, width) {
  const names = [...apart.map((verb) => verb.replaceAll("_", " ")), "the rest"];
  const bars = timeBars(run, apart, Math.max(10, Math.floor(width / 6)));
  const whole = bars.map((bar) => bar.parts.reduce((sum, part) => sum + part, 0));
  const layers = names.map((_, layer) => ({ colour: partColour(apart, layer), values: bars.map((bar, i) => bar.parts[layer] / (page.shares ? whole[i] || 1 : 1)) }));
  const middle = (bars[0].last - bars[0].first) / 2;
  stackedBars(host, bars.map((bar) => bar.first + middle), layers, {
    width, height: 230, room: STAGES_PX, marks: stageMarks([run], new Set([0])),
    x: { range: [run.steps[0] - 0.5, run.steps.at(-1) + 0.5] },
    y: { range: [0, page.shares ? 1 : Math.max(...whole) * 1.03 || 1] },
    yText: page.shares ? (value) => `${Math.round(100 * value)}%` : tickText,
    tell: (i) => {
      const { first, last, parts } = bars[i];
      const told = parts.map((part, place) => [part, names[place]]).filter(([part]) => part > 0).sort((a, b) => b[0] - a[0]);
      const lines = told.map(([part, name]) => `${name}: ${duration(part)} (${percent(part / whole[i])})`);
      return [`${first === last ? `step ${first}` : `steps ${first} to ${last}, mean`}: ${duration(whole[i])}`, ...lines].join("\n");
    },
  });
}

const partColour = (apart, part) => (part < apart.length ? colourOf(part) : "var(--line)");

function timesTab(page) {
  const timed = page.runs.map((run, index) => ({ run, index })).filter(({ run }) => Object.keys(verbTotals(run)).length);
  if (!timed.length) return [el("p", { class: "note" }, "No times are recorded.")];
  const apart = verbsApart(page);
  const legend = el("div", { class: "legend" }, ...[...apart, "the rest"].map((verb, i) => el("span", {}, el("i", { style: `background:${partColour(apart, i)}` }), verb.replaceAll("_", " "))));
  const shares = el("input", { type: "checkbox", checked: page.shares, onchange: (event) => { page.shares = event.target.checked; plots.forEach((plot) => plot.redraw()); } });
  const plots = [];
  const charts = timed.map(({ run, index }) => {
    const plot = lazily(el("div", { class: "plot" }), (host, width) => drawTimes(page, run, apart, host, width));
    plots.push(plot);
    page.redraws.push(plot);
    return el("section", { "data-run": index }, el("h3", {}, run.label, el("span", { class: "note" }, "  seconds per step")), plot);
  });
  return [el("div", { class: "controls" }, el("label", {}, shares, "as shares")), legend, ...charts, el("h2", {}, "All steps"), current(page, () => timesTable(timed))];
}

function timesTable(timed) {
  const totals = timed.map(({ run }) => verbTotals(run));
  const sums = totals.map((each) => Object.values(each).reduce((sum, value) => sum + value, 0));
  const verbs = [...new Set(totals.flatMap(Object.keys))];
  const head = el("tr", {}, el("th", {}, "verb"), ...timed.flatMap(({ run }) => [el("th", { class: "n" }, run.label), el("th", { class: "n" }, "share")]));
  const rows = verbs.map((verb) => el("tr", {}, el("td", {}, verb.replaceAll("_", " ")), ...totals.flatMap((each, i) => [el("td", { class: "n" }, duration(each[verb])), el("td", { class: "n" }, percent(each[verb] / sums[i]))])));
  const all = el("tr", {}, el("td", {}, "all"), ...sums.flatMap((sum) => [el("td", { class: "n" }, duration(sum)), el("td", { class: "n" }, "")]));
  const other = timed.map(({ run }) => (run.metrics["time/other"]?.[1] ?? []).reduce((sum, value) => sum + (value ?? 0), 0));
  const rest = el("tr", {}, el("td", {}, "of which neither decoding nor training"), ...other.flatMap((sum, i) => [el("td", { class: "n" }, duration(sum)), el("td", { class: "n" }, percent(sum / sums[i]))]));
  return el("div", { class: "wide" }, el("table", {}, head, ...rows, all, rest));
}
