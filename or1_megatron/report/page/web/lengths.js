// Response lengths by outcome, and truncated responses per group, stage by stage.

const OUTCOMES = [["right", "var(--right)"], ["not right", "var(--wrong)"], ["truncated", "var(--cut)"]];

function drawLengths({ edges, counts }, limit, width) {
  const bins = edges.length - 1;
  const totals = Array.from({ length: bins }, (_, i) => OUTCOMES.reduce((sum, [kind]) => sum + counts[kind][i], 0));
  const plot = frame({ width, height: 210, x: [edges[0], edges[bins]], y: [0, Math.max(1, ...totals) * 1.04] });
  for (let i = 0; i < bins; i++) {
    let below = 0;
    const stack = svg("g");
    for (const [kind, colour] of OUTCOMES) {
      if (!counts[kind][i]) continue;
      const [high, low] = [plot.up(below + counts[kind][i]), plot.up(below)];
      const [left, right] = [plot.across(edges[i]), plot.across(edges[i + 1])];
      stack.append(svg("rect", { x: left, y: high, width: Math.max(0.5, right - left - 1), height: low - high, fill: colour }));
      below += counts[kind][i];
    }
    hint(stack, `${count(edges[i])} to ${count(edges[i + 1] - 1)} tokens: ${plural(totals[i], "response")}\n${OUTCOMES.map(([kind]) => `${kind}: ${count(counts[kind][i])}`).join("\n")}`);
    plot.layer.append(stack);
  }
  if (limit !== null) {
    const at = plot.across(limit + 1); // what has T tokens is left of it
    plot.layer.append(svg("line", { x1: at, x2: at, y1: plot.inner.top, y2: plot.inner.bottom, stroke: "var(--ink)", "stroke-dasharray": "6 4" }));
    const label = svg("text", { x: at - 5, y: plot.inner.top + 9, "text-anchor": "end", class: "soft", "paint-order": "stroke", stroke: "var(--ground)", "stroke-width": 4 });
    label.textContent = `T ${count(limit)}`;
    plot.layer.append(label);
  }
  return plot.root;
}

function drawTruncated({ labels, counts }, width) {
  const plot = frame({ width, height: 210, x: [-0.5, labels.length - 0.5], y: [0, Math.max(1, ...counts) * 1.15], whole: true, xText: () => "" });
  const all = counts.reduce((sum, each) => sum + each, 0);
  const size = plot.across(1) - plot.across(0);
  counts.forEach((each, i) => {
    const [middle, high] = [plot.across(i), plot.up(each)];
    plot.layer.append(hint(svg("rect", { x: middle - size / 2 + 1, y: high, width: Math.max(1, size - 2), height: plot.inner.bottom - high, fill: "var(--cut)" }), `${labels[i]} truncated: ${plural(each, "group")} (${percent(each / all)})`));
    if (size * 1 >= 8 * labels[i].length || i % 2 === 0) {
      const label = svg("text", { x: middle, y: plot.inner.bottom + 16, "text-anchor": "middle", class: "soft" });
      label.textContent = labels[i];
      plot.layer.append(label);
    }
    if (each && size > 30) {
      const label = svg("text", { x: middle, y: high - 4, "text-anchor": "middle" });
      label.textContent = count(each);
      plot.layer.append(label);
    }
  });
  return plot.root;
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
        el("div", { class: "chart" }, el("header", {}, "responses by length", el("span", {}, "tokens")), lazily(el("div", { class: "plot" }), (width) => drawLengths(stage.lengths, stage.limit, width))),
        el("div", { class: "chart" }, el("header", {}, "groups by truncated responses", el("span", {}, stage.truncated.labels.at(-1).endsWith("%") ? "share of the group" : `of ${stage.truncated.labels.length - 1}`)), lazily(el("div", { class: "plot" }), (width) => drawTruncated(stage.truncated, width)))));
  }));
  if (!sections.length) return [el("p", { class: "note" }, "No rollouts are kept: there are no lengths to count.")];
  return [el("p", { class: "note" }, "Over all steps whose rollouts are kept."), legend, ...sections];
}
