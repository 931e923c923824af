// Response lengths by outcome, and truncated responses per group, stage by stage.

const OUTCOMES = [["right", "var(--right)"], ["not right", "var(--wrong)"], ["truncated", "var(--cut)"]];

const LENGTH_BINS = 40;

/** Return the responses of a run, [rows of its stage], by the stage's name, in the order of steps. */
function rowsByStage({ header, columns }, index) {
  const found = new Map();
  for (let row = 0; row < columns.step.length; row++) {
    if (columns.run[row] !== index) continue;
    const stage = header.words.stage[columns.stage[row]];
    if (!found.has(stage)) found.set(stage, []);
    found.get(stage).push(row);
  }
  return found;
}

/** Return {edges: [bins + 1] in tokens, counts: {outcome: [bins]}} of the lengths of these rows. */
function lengthsOf({ header, columns }, rows, limit) {
  const right = header.words.status.indexOf("right");
  const longest = rows.reduce((most, row) => Math.max(most, columns.tokens[row]), Math.max(limit ?? 0, 1));
  const size = Math.ceil((longest + 1) / LENGTH_BINS);
  const edges = Array.from({ length: Math.ceil((longest + 1) / size) + 1 }, (_, i) => i * size);
  const counts = Object.fromEntries(OUTCOMES.map(([kind]) => [kind, new Array(edges.length - 1).fill(0)]));
  for (const row of rows) counts[columns.truncated[row] ? "truncated" : columns.status[row] === right ? "right" : "not right"][Math.floor(columns.tokens[row] / size)] += 1;
  return { edges, counts };
}

/** Return the number of groups with 0, 1, ... truncated responses, up to the size of the largest group. */
function truncatedOf({ columns }, rows) {
  const groups = [];
  for (const [i, row] of rows.entries()) {
    const goesOn = i && columns.sample[row] && columns.problem[row] === columns.problem[rows[i - 1]] && columns.step[row] === columns.step[rows[i - 1]];
    if (!goesOn) groups.push([]);
    groups.at(-1).push(columns.truncated[row]);
  }
  const counts = new Array(groups.reduce((most, group) => Math.max(most, group.length), 0) + 1).fill(0);
  for (const group of groups) counts[group.reduce((sum, each) => sum + each, 0)] += 1;
  return counts;
}

function drawLengths({ edges, counts }, limit, host, width) {
  const size = edges[1] - edges[0];
  const places = edges.slice(0, -1).map((edge) => edge + size / 2);
  const totals = places.map((_, i) => OUTCOMES.reduce((sum, [kind]) => sum + counts[kind][i], 0));
  stackedBars(host, places, OUTCOMES.map(([kind, colour]) => ({ colour, values: counts[kind] })), {
    width, height: 210, x: { range: [edges[0], edges.at(-1)] }, y: { range: [0, Math.max(1, ...totals) * 1.04] },
    marks: limit === null ? [] : [{ kind: "limit", x: limit + 1, text: `T ${count(limit)}` }], // a response of T tokens is left of it
    tell: (i) => [`${count(edges[i])} to ${count(edges[i + 1] - 1)} tokens: ${plural(totals[i], "response")}`, ...OUTCOMES.map(([kind]) => `${kind}: ${count(counts[kind][i])}`)].join("\n"),
  });
}

function drawTruncated(counts, host, width) {
  const all = counts.reduce((sum, each) => sum + each, 0);
  const tall = width / counts.length > 34 ? counts.flatMap((each, x) => (each ? [{ kind: "count", x, y: each, text: count(each) }] : [])) : [];
  stackedBars(host, [...counts.keys()], [{ colour: "var(--cut)", values: counts }], {
    width, height: 210, x: { range: [-0.5, counts.length - 0.5] }, y: { range: [0, Math.max(1, ...counts) * 1.15] }, marks: tall,
    xText: (value) => (value in counts ? String(value) : ""),
    tell: (i) => `${i} truncated: ${plural(counts[i], "group")} (${percent(counts[i] / all)})`,
  });
}

function lengthsTab(page, data) {
  const legend = el("div", { class: "legend" }, ...OUTCOMES.map(([kind, colour]) => el("span", {}, el("i", { style: `background:${colour}` }), kind)));
  const sections = page.runs.flatMap((run, index) => [...rowsByStage(data, index)].map(([stage, rows]) => {
    const limit = run.stages.find(([name]) => name === stage)?.[2] ?? null;
    const [lengths, truncated] = [lengthsOf(data, rows, limit), truncatedOf(data, rows)];
    const cut = lengths.counts.truncated.reduce((sum, each) => sum + each, 0);
    const told = `steps ${data.columns.step[rows[0]]} to ${data.columns.step[rows.at(-1)]}, ${plural(rows.length, "response")}, ${percent(cut / rows.length)} truncated`;
    return el("section", { "data-run": index },
      el("h3", {}, `${run.label}: ${stage} `, el("span", { class: "note" }, told)),
      el("div", { class: "grid large" },
        el("div", { class: "chart" }, el("header", {}, "responses by length", el("span", {}, "tokens")), lazily(el("div", { class: "plot" }), (host, width) => drawLengths(lengths, limit, host, width))),
        el("div", { class: "chart" }, el("header", {}, "groups by truncated responses", el("span", {}, `of ${truncated.length - 1}`)), lazily(el("div", { class: "plot" }), (host, width) => drawTruncated(truncated, host, width)))));
  }));
  if (!sections.length) return [el("p", { class: "note" }, "No rollouts are kept: there are no lengths to count.")];
  return [legend, ...sections];
}
