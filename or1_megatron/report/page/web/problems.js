// How pass rates of problems move between two stages.

/** Bins of pass rates: exactly 0%, intervals [low, high), and exactly 100%. */
const PASS_RATES = ["0%", "0–25%", "25–50%", "50–75%", "75–100%", "100%", "not sampled"];
const NOT_SAMPLED = PASS_RATES.length - 1;

/** Return Map of period to Map of problem to the bin of its pass rate, of a run: its stages, or the halves of one stage. */
function periodsOf(data, index) {
  const { header, columns } = data;
  const periods = rowsByStage(data, index);
  periods.delete("held-out");
  const [[stage, rows], ...others] = periods.size ? periods : [[null, []]];
  const steps = [...new Set(rows.map((row) => columns.step[row]))];
  if (!others.length && steps.length > 1) {
    const half = Math.floor(steps.length / 2);
    const middle = rows.findIndex((row) => columns.step[row] === steps[half]);
    periods.delete(stage);
    periods.set(`steps ${steps[0]}–${steps[half - 1]}`, rows.slice(0, middle)).set(`steps ${steps[half]}–${steps.at(-1)}`, rows.slice(middle));
  }
  const right = header.words.status.indexOf("right");
  const bin = (good, all) => (good === 0 ? 0 : good === all ? NOT_SAMPLED - 1 : 1 + Math.floor((4 * good) / all));
  return new Map([...periods].map(([name, of]) => {
    const rates = new Map();
    for (const row of of) {
      const problem = header.words.problem[columns.problem[row]];
      const [good, all] = rates.get(problem) ?? [0, 0];
      rates.set(problem, [good + (columns.status[row] === right), all + 1]);
    }
    return [name, new Map([...rates].map(([problem, rate]) => [problem, bin(...rate)]))];
  }));
}

/** Return [bin in the first period][bin in the second]: the set of problems. */
function moved(before, after) {
  const table = PASS_RATES.map(() => PASS_RATES.map(() => new Set()));
  for (const problem of new Set([...before.keys(), ...after.keys()])) table[before.get(problem) ?? NOT_SAMPLED][after.get(problem) ?? NOT_SAMPLED].add(problem);
  return table;
}

function migrationTable(page, index, table, from, to) {
  const most = Math.max(1, ...table.slice(0, -1).flatMap((row) => row.slice(0, -1).map((problems) => problems.size)));
  const head = el("tr", {}, el("th", {}, `${from} ↓  ${to} →`), ...PASS_RATES.map((name) => el("th", { class: "n" }, name)));
  const rows = table.map((row, i) => el("tr", {}, el("th", {}, PASS_RATES[i]), ...row.map((problems, j) => {
    if (!problems.size) return el("td", { class: "empty" }, i === NOT_SAMPLED && j === NOT_SAMPLED ? "" : "0");
    const known = i < NOT_SAMPLED && j < NOT_SAMPLED;
    const colour = j > i ? "var(--right)" : j < i ? "var(--wrong)" : "var(--c7)";
    const share = known ? Math.round(8 + 52 * Math.sqrt(problems.size / most)) : 0;
    const button = el("button", { type: "button", title: `show the responses to these ${plural(problems.size, "problem")}`, onclick: () => page.browse(index, problems, `${PASS_RATES[i]} → ${PASS_RATES[j]}`) }, count(problems.size));
    return el("td", { style: `background:color-mix(in srgb, ${colour} ${share}%, transparent)` }, button);
  })));
  return el("div", { class: "wide" }, el("table", { class: "matrix" }, head, ...rows));
}

/** Return as text how many problems sampled in both periods got better, got worse and stayed. */
function balance(table) {
  let [better, worse, same] = [0, 0, 0];
  table.slice(0, -1).forEach((row, i) => row.slice(0, -1).forEach(({ size }, j) => {
    if (j > i) better += size;
    else if (j < i) worse += size;
    else same += size;
  }));
  return `${plural(better + worse + same, "problem")} sampled in both: ${count(better)} in a higher bin, ${count(worse)} in a lower one, ${count(same)} in the same`;
}

function problemsTab(page, data) {
  const sections = page.runs.flatMap((run, index) => {
    const found = periodsOf(data, index);
    const periods = [...found.keys()];
    if (periods.length < 2) return [];
    const place = el("div");
    const choose = (label, chosen) => {
      const select = el("select", { "aria-label": label, onchange: () => draw() });
      periods.forEach((period, i) => select.append(el("option", { value: i, selected: i === chosen }, period)));
      return select;
    };
    const [from, to] = [choose("from", periods.length - 2), choose("to", periods.length - 1)];
    const draw = () => {
      if (Number(from.value) >= Number(to.value)) place.replaceChildren(el("p", { class: "note" }, "Choose an earlier period on the left."));
      else {
        const names = [periods[from.value], periods[to.value]];
        const table = moved(...names.map((name) => found.get(name)));
        place.replaceChildren(el("p", { class: "note" }, balance(table)), migrationTable(page, index, table, ...names));
      }
    };
    draw();
    const controls = periods.length > 2 ? [el("div", { class: "controls" }, el("label", {}, "from", from), el("label", {}, "to", to))] : [];
    return [el("section", { "data-run": index }, el("h3", {}, run.label), ...controls, place)];
  });
  if (!sections.length) return [el("p", { class: "note" }, "To compare, rollouts of at least two steps must be kept.")];
  return [el("p", { class: "note" }, "A problem's pass rate is the share of right responses among all its kept responses of the stage. For a run of one stage, the first half is compared with the second. Click on a number to list the responses."), ...sections];
}
