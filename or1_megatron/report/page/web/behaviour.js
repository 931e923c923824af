// The tab of behaviour: repetition, entropy and so on over the steps; prompts gained and lost; responses side by side.

const TENTHS = [...Array(10).keys()];
const KINDS = ["space", "digit", "CJK", "word", "operator", "other"];
/** Charts of [title, unit, meaning, metrics without "behaviour/", their colours, their names]. */
const BEHAVIOUR = [
  ["length by verdict", "tokens", "mean length of the right, the wrong and the truncated responses", ["length/right", "length/wrong", "length/truncated"], ["var(--right)", "var(--wrong)", "var(--cut)"], ["right", "wrong", "truncated"]],
  ["truncated", "share of responses", "cut off at T", ["truncated"]],
  ["ends in a loop", "share of responses", "fewer than half of the 8-grams of the last 200 tokens are distinct", ["repeats"]],
  ["other scripts", "share of letters", "letters that are not of the prompt's main script (Latin; Cyrillic; Hebrew and Arabic; South Asian; CJK, where a character counts as three), mean over responses. Greek is not counted", ["other_script"]],
  ["checking words", "per 1,000 tokens", "wait, hmm, alternatively, verify, double-check, let me check, 等等, 验证, 检查, ...", ["checks"]],
  ["answer changed", "share of responses", "the response has boxes with different answers", ["changed"]],
  ["entropy by place in the response", "nats per token", "mean over the tokens of each tenth of the response; as entropy/sampled: minus the engine's log-prob of the sampled tokens", TENTHS.map((i) => `entropy/tenth/${i}`), TENTHS.map((i) => `hsl(${220 - 22 * i} 70% 52%)`), ["first tenth", 2, 3, 4, 5, 6, 7, 8, 9, "last"]],
  ["entropy by kind of token", "nats per token", "the same over the tokens of each kind; other: punctuation, LaTeX commands, special tokens", KINDS.map((kind) => `entropy/kind/${kind}`), KINDS.map((_, i) => colourOf(i)), KINDS],
];

/** The metrics whose curves each alarm marks; an alarm of another name marks those that hold its name. */
const ALARMED = { grad_norm: /^policy\/grad_norm/, mismatch: /^mismatch\//, entropy: /entropy/, non_truncated: /^accuracy|truncat|^length|behaviour\/length/, plateau: /^accuracy/, rejected: /^groups\/|^reward\// };

/** Return [{step, name, text}] of a run's alarms. A run that has recorded no texts has the beginnings of their episodes. */
function alarmsOf(page, run) {
  if (run.alarms.length) return run.alarms.map(({ step, text }) => ({ step, text, name: /^alarm '(\w+)'/.exec(text)?.[1] ?? "loss" }));
  const meanings = new Map(page.metrics.map(([name, , meaning]) => [name, meaning]));
  return Object.entries(run.metrics).filter(([name]) => name.startsWith("alarm/")).flatMap(([name, [places, values]]) =>
    places.filter((_, i) => values[i] && !values[i - 1]).map((at) => ({ step: run.steps[at], name: name.slice(6), text: `alarm '${name.slice(6)}' at step ${run.steps[at]}: ${meanings.get(name)}` })));
}

/** Return the alarms of the runs shown that rang on one of these metrics, as marks of a chart. */
function alarmMarks(page, names) {
  return page.runs.flatMap((run, index) => (!page.shown.has(index) || !run.axes[page.axis] ? [] : alarmsOf(page, run)
    .filter(({ name }) => names.some((metric) => (ALARMED[name] ?? new RegExp(name)).test(metric)))
    .filter(({ step }) => run.steps.includes(step))
    .map(({ step, text }) => ({ kind: "alarm", text: "▼", x: run.axes[page.axis][run.steps.indexOf(step)], colour: colourOf(index), sentence: page.runs.length > 1 ? `${run.label}: ${text}` : text }))));
}

/** Add what each step's responses are like to the runs' metrics, as behaviour/<name>. */
function addBehaviour(page) {
  for (const run of page.runs) {
    const found = {};
    run.steps.forEach((step, at) => {
      for (const [name, value] of Object.entries(run.behaviour?.[step] ?? {})) {
        const [places, values] = found[`behaviour/${name}`] ??= [[], []];
        places.push(at);
        values.push(value);
      }
    });
    Object.assign(run.metrics, found);
  }
}

function behaviourCharts(page) {
  const grid = el("div", { class: "grid large" });
  for (const [title, unit, meaning, short, colours, captions] of BEHAVIOUR) {
    const there = short.map((name, i) => ({ name: `behaviour/${name}`, i })).filter(({ name }) => page.runs.some((run) => run.metrics[name]));
    if (!there.length) continue;
    const names = there.map(({ name }) => name);
    names.colours = colours && there.map(({ i }) => colours[i]);
    const legend = captions ? el("span", {}, ...there.map(({ i }) => el("i", { style: `color:${colours[i]}` }, `${captions[i]} `)), page.runs.length > 1 ? `dashed: all runs but ${page.runs[0].label}` : "") : unit;
    grid.append(curveChart(page, captions ? `${title}, ${unit}` : title, legend, meaning, names, 220));
  }
  return grid.children.length ? [curveControls(page), grid] : [el("p", { class: "note" }, "No rollouts are kept: there is no behaviour to measure.")];
}

function alarmList(page) {
  const found = page.runs.flatMap((run) => alarmsOf(page, run).map(({ text }) => el("li", {}, page.runs.length > 1 ? `${run.label}: ` : "", text)));
  return found.length ? [el("h2", {}, "Alarms ", el("span", { class: "note" }, "▼ in the charts")), el("ul", { class: "alarms" }, ...found)] : [];
}

/** Return [{file, run, heldOut, step, title}] of the rollout files kept, held-out ones first. */
function samplesOf(page, data) {
  const found = filesOf(page, data).map(([file, run, folder, step]) => {
    const heldOut = folder === "evaluations";
    return { file, run: Number(run), heldOut, step: Number(step), title: `${page.runs.length > 1 ? `${page.runs[run].label}, ` : ""}${heldOut ? "held-out after" : "training,"} step ${step}` };
  });
  return found.sort((a, b) => b.heldOut - a.heldOut || a.run - b.run || a.step - b.step);
}

/** Return Map of problem to its rows in a sample. */
function problemsOf({ header, columns }, sample) {
  const stage = header.words.stage.indexOf("held-out");
  const found = new Map();
  for (let row = 0; row < columns.step.length; row++) {
    if (columns.run[row] !== sample.run || columns.step[row] !== sample.step || (columns.stage[row] === stage) !== sample.heldOut) continue;
    if (!found.has(columns.problem[row])) found.set(columns.problem[row], []);
    found.get(columns.problem[row]).push(row);
  }
  return found;
}

/** Return [{problem, before, after, rows: [of a, of b]}] of the problems in both samples; the numbers are shares of right responses. */
function compared(data, a, b) {
  const status = data.header.words.status.indexOf("right");
  const rate = (rows) => rows.filter((row) => data.columns.status[row] === status).length / rows.length;
  const [from, to] = [problemsOf(data, a), problemsOf(data, b)];
  return [...from].filter(([problem]) => to.has(problem)).map(([problem, rows]) => ({ problem, before: rate(rows), after: rate(to.get(problem)), rows: [rows, to.get(problem)] }));
}

/** Return the pair to begin with: the ends of the first run's evaluations, else the two last samples with a problem in common. */
function firstPair(samples, { columns }) {
  const own = samples.filter((each) => each.heldOut && each.run === samples[0].run);
  if (own.length > 1) return [own[0], own.at(-1)];
  const trained = new Map(samples.filter((each) => !each.heldOut).map((each) => [`${each.run}/${each.step}`, each]));
  const seen = new Map();
  for (let row = columns.step.length - 1; row >= 0; row--) {
    const sample = trained.get(`${columns.run[row]}/${columns.step[row]}`);
    const other = seen.get(columns.problem[row]);
    if (sample && other && other !== sample) return [sample, other];
    seen.set(columns.problem[row], sample);
  }
  return [samples.at(-2), samples.at(-1)];
}

/** One of two responses side by side: a choice of the problem's samples, and the text of the chosen one. */
function oneSide(page, data, sample, rows) {
  const { header, columns } = data;
  const place = el("div");
  const draw = async (row) => {
    const id = `${header.words.problem[columns.problem[row]]}/${columns.step[row]}/${columns.sample[row]}`;
    const text = await textOf(data, row);
    const about = { tokens: columns.tokens[row], kept: Boolean(columns.kept[row]), advantage: columns.advantage[row], topAdvantage: page.topAdvantage };
    place.replaceChildren(...(text ? responseView(text, about) : [el("p", { class: "note" }, "Its text is not in this page. To include it, write the page again with ", el("code", {}, `--ids ${id}`))]));
  };
  const words = (row) => `${columns.text[row] >= 0 ? "● " : ""}sample ${columns.sample[row]}: ${header.words.status[columns.status[row]]}, ${plural(columns.tokens[row], "token")}`;
  const first = rows.find((row) => columns.text[row] >= 0) ?? rows[0];
  const select = el("select", { "aria-label": `sample of ${sample.title}`, onchange: () => draw(Number(select.value)) }, ...rows.map((row) => el("option", { value: row, selected: row === first }, words(row))));
  draw(first);
  return el("div", {}, el("h3", {}, sample.title), select, place);
}

function comparison(page, counted) {
  const heading = el("h2", {}, "Prompts gained and lost");
  const samples = samplesOf(page, counted);
  if (samples.length < 2) return [heading, el("p", { class: "note" }, "To compare, responses of at least two steps must be kept.")];
  const pair = firstPair(samples, counted);
  const [told, sides, prompt, place] = [el("p", { class: "note", role: "status" }), el("div", { class: "sides" }), el("div"), el("div", { class: "sides" })];
  const choose = (label, chosen) => el("select", { "aria-label": label, onchange: () => load() }, ...samples.map((each, i) => el("option", { value: i, selected: each === chosen }, each.title)));
  const [from, to] = [choose("from", pair[0]), choose("to", pair[1])];
  const which = el("select", { "aria-label": "which prompts", onchange: () => draw() }, ...["changed", "gained", "lost", "all"].map((value) => el("option", { value }, value)));
  let [data, found, both] = [null, [], []];
  const inFull = (i) => found[i].rows.every((rows) => rows.some((row) => data.columns.text[row] >= 0));
  const name = (i) => data.header.words.problem[found[i].problem];
  const numeric = (title, width, value, text = percent) => ({ title, width, number: true, text: (i) => text(value(found[i])), order: (i) => value(found[i]) });
  const table = virtualTable([
    { title: "●", hint: "a response of each side is in this page", width: 46, text: (i) => (inFull(i) ? "●" : ""), order: (i) => (inFull(i) ? 0 : 1) },
    { title: "problem", hint: "id of the problem", width: 170, text: name, order: name },
    numeric("from", 90, (each) => each.before), numeric("to", 90, (each) => each.after),
    { ...numeric("change", 90, (each) => each.after - each.before), tone: (i) => (found[i].after > found[i].before ? "right" : found[i].after < found[i].before ? "wrong" : "") },
  ], async (i) => {
    const [chosen, shown] = [found[i], both];
    const known = chosen.rows.flat().find((row) => data.columns.text[row] >= 0);
    const said = known === undefined ? null : (await textOf(data, known)).header;
    if (chosen !== found[i]) return; // others were chosen meanwhile
    prompt.replaceChildren(el("h3", {}, "problem ", el("code", {}, name(i))), ...(said ? [el("div", { class: "text prompt" }, visible(said.prompt ?? "")), el("p", { class: "note" }, `expected: ${said.ground_truth ?? "not recorded"}`)] : []));
    sides.replaceChildren(...shown.map((sample, side) => oneSide(page, data, sample, chosen.rows[side])));
  });
  table.root.classList.add("short");
  table.root.setAttribute("aria-label", "prompts");
  async function load() {
    const asked = [from, to].map((select) => samples[select.value]);
    both = asked;
    try {
      const fresh = await responsesOf(page, asked.map(({ file }) => file));
      if (both !== asked) return; // others were chosen meanwhile
      [data, found] = [fresh, compared(fresh, ...asked)];
      draw();
    } catch (error) {
      told.textContent = error.message;
    }
  }
  function draw() {
    if (!data) return;
    const [gained, lost] = [found.filter((each) => each.after > each.before), found.filter((each) => each.after < each.before)];
    const notes = live ? data.header.notes.map((note) => `${note}. `).join("") : ""; // else they are at the top
    told.textContent = `${notes}${plural(found.length, "prompt")} in both: ${count(gained.length)} gained, ${count(lost.length)} lost, ${count(found.length - gained.length - lost.length)} as before`;
    const fits = { changed: (each) => each.before !== each.after, gained: (each) => each.after > each.before, lost: (each) => each.after < each.before, all: () => true }[which.value];
    const order = [...found.keys()].filter((i) => fits(found[i])).sort((i, j) => inFull(j) - inFull(i) || Math.abs(found[j].after - found[j].before) - Math.abs(found[i].after - found[i].before));
    if (!table.root.isConnected) place.replaceChildren(table.root, prompt);
    table.show(Uint32Array.from(order));
    sides.replaceChildren();
    prompt.replaceChildren();
    if (order.length) table.choose(order[0]);
  }
  load();
  const controls = el("div", { class: "controls" }, el("label", {}, "from", from), el("label", {}, "to", to), el("label", {}, "prompts", which));
  return [heading, controls, told, place, sides];
}

function behaviourTab(page, data) {
  page.runs.forEach((run, index) => { run.behaviour = data.header.behaviour[index]; });
  addBehaviour(page);
  return [...behaviourCharts(page), ...alarmList(page), ...comparison(page, data)];
}
