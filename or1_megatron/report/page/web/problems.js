// How pass rates of problems move between two stages.

function migrationTable(page, run, index, from, to) {
  const { periods, tables } = run.migration;
  const table = tables[`${from}-${to}`];
  const names = [...page.passRates, "not sampled"];
  const most = Math.max(1, ...table.slice(0, -1).flatMap((row) => row.slice(0, -1)));
  const head = el("tr", {}, el("th", {}, `${periods[from]} ↓  ${periods[to]} →`), ...names.map((name) => el("th", { class: "n" }, name)));
  const rows = table.map((row, i) => el("tr", {}, el("th", {}, names[i]), ...row.map((problems, j) => {
    if (!problems) return el("td", { class: "empty" }, i === row.length - 1 && j === row.length - 1 ? "" : "0");
    const known = i < names.length - 1 && j < names.length - 1;
    const colour = j > i ? "var(--right)" : j < i ? "var(--wrong)" : "var(--c7)";
    const share = known ? Math.round(8 + 52 * Math.sqrt(problems / most)) : 0;
    const button = el("button", { type: "button", title: `show the responses to these ${plural(problems, "problem")}`, onclick: () => page.browse(index, problemsIn(page, index, from, to, i, j), `${names[i]} → ${names[j]}`) }, count(problems));
    return el("td", { style: `background:color-mix(in srgb, ${colour} ${share}%, transparent)` }, button);
  })));
  return el("div", { class: "wide" }, el("table", { class: "matrix" }, head, ...rows));
}

/** Return the problems of one cell, as a set of places in the page's list. */
function problemsIn(page, index, from, to, i, j) {
  const [before, after] = [page.columns[`bins/${index}/${from}`], page.columns[`bins/${index}/${to}`]];
  const found = new Set();
  before.forEach((bin, problem) => {
    if (bin === i && after[problem] === j) found.add(page.problems ? page.problems[problem] : problem);
  });
  return found;
}

/** Return as text how many problems sampled in both periods got better, got worse and stayed. */
function balance(table) {
  let [better, worse, same] = [0, 0, 0];
  table.slice(0, -1).forEach((row, i) => row.slice(0, -1).forEach((problems, j) => {
    if (j > i) better += problems;
    else if (j < i) worse += problems;
    else same += problems;
  }));
  return `${plural(better + worse + same, "problem")} sampled in both: ${count(better)} in a higher bin, ${count(worse)} in a lower one, ${count(same)} in the same`;
}

function problemsTab(page) {
  const sections = page.runs.flatMap((run, index) => {
    if (!run.migration) return [];
    const { periods, tables } = run.migration;
    const place = el("div");
    const choose = (label, chosen) => {
      const select = el("select", { "aria-label": label, onchange: () => draw() });
      periods.forEach((period, i) => select.append(el("option", { value: i, selected: i === chosen }, period)));
      return select;
    };
    const [from, to] = [choose("from", periods.length - 2), choose("to", periods.length - 1)];
    const draw = () => {
      if (Number(from.value) >= Number(to.value)) place.replaceChildren(el("p", { class: "note" }, "Choose an earlier period on the left."));
      else place.replaceChildren(el("p", { class: "note" }, balance(tables[`${from.value}-${to.value}`])), migrationTable(page, run, index, Number(from.value), Number(to.value)));
    };
    draw();
    const controls = periods.length > 2 ? [el("div", { class: "controls" }, el("label", {}, "from", from), el("label", {}, "to", to))] : [];
    return [el("section", { "data-run": index }, el("h3", {}, run.label), ...controls, place)];
  });
  if (!sections.length) return [el("p", { class: "note" }, "To compare, rollouts of at least two steps must be kept.")];
  return [el("p", { class: "note" }, "A problem's pass rate is the share of right responses among all its kept responses of the stage. For a run of one stage, the first half is compared with the second. Click on a number to list the responses."), ...sections];
}
