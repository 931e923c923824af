// Response lengths by outcome, and truncated responses per group, stage by stage.

const OUTCOMES = [["right", "var(--right)"], ["not right", "var(--wrong)"], ["truncated", "var(--cut)"]];

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

function lengthsTab(page) {
  const legend = el("div", { class: "legend" }, ...OUTCOMES.map(([kind, colour]) => el("span", {}, el("i", { style: `background:${colour}` }), kind)));
  const sections = page.runs.flatMap((run, index) => run.histograms.map((stage) => {
    const [first, last] = stage.steps;
    const cut = stage.lengths.counts.truncated.reduce((sum, each) => sum + each, 0);
    const told = `steps ${first} to ${last}, ${plural(stage.responses, "response")}, ${percent(cut / stage.responses)} truncated`;
    return el("section", { "data-run": index },
      el("h3", {}, `${run.label}: ${stage.stage} `, el("span", { class: "note" }, told)),
      el("div", { class: "grid large" },
        el("div", { class: "chart" }, el("header", {}, "responses by length", el("span", {}, "tokens")), lazily(el("div", { class: "plot" }), (host, width) => drawLengths(stage.lengths, stage.limit, host, width))),
        el("div", { class: "chart" }, el("header", {}, "groups by truncated responses", el("span", {}, `of ${stage.truncated.length - 1}`)), lazily(el("div", { class: "plot" }), (host, width) => drawTruncated(stage.truncated, host, width)))));
  }));
  if (!sections.length) return [el("p", { class: "note" }, "No rollouts are kept: there are no lengths to count.")];
  return [...(live ? [] : [el("p", { class: "note" }, "Over all steps whose rollouts are kept.")]), legend, ...sections];
}
