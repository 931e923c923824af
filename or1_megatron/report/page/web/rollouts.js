// The browser of responses: filters, the table of all responses, and one of them in full.

/** Note the largest advantage of the responses, which the view of a response takes as the end of its scale. */
function rated(page, data) {
  page.topAdvantage = data.columns.advantage.reduce((top, value) => (Math.abs(value) > top ? Math.abs(value) : top), 0);
  return data;
}

async function rolloutsTab(page) {
  const shown = live ? responsesOfStep(page) : [];
  const data = await (live ? page.rows : allRows(page));
  const { header, columns } = data;
  const notes = live ? header.notes.map((note) => el("p", { class: "note" }, note)) : []; // else they are at the top
  if (!columns.step.length) return [...(shown.length && page.kept.length ? [stepControl(page, ...shown)] : []), ...notes, el("p", { class: "note" }, "No rollouts are kept: there is nothing to browse.")];
  const words = header.words;
  const place = el("div", { id: "detail", hidden: true });
  const browser = el("div", { id: "browser" });
  const table = virtualTable(tableColumns(page, columns, words), (row) => open(row));
  const told = el("p", { class: "note", role: "status" });
  const filters = filterControls(page, columns, words, () => filter());
  if (live) filters.root.prepend(stepControl(page, ...shown));
  let chosen = -1;
  let only = null; // {run, problems, title} of a cell of the migration table

  function filter() {
    const fits = filters.test();
    const found = new Uint32Array(columns.step.length);
    let [size, rewards, texts] = [0, 0, 0];
    for (let row = 0; row < columns.step.length; row++) {
      if (!page.shown.has(columns.run[row]) || !fits(row)) continue;
      if (only && (columns.run[row] !== only.run || !only.problems.has(words.problem[columns.problem[row]]))) continue;
      found[size++] = row;
      rewards += columns.reward[row];
      texts += columns.text[row] >= 0;
    }
    table.show(found.slice(0, size));
    told.replaceChildren(`${count(size)} of ${plural(columns.step.length, "response")}` + (size ? `, mean reward ${number(rewards / size)}${live ? "" : `, ${count(texts)} in full ●`}` : ""));
    if (only) told.append(" · ", el("button", { type: "button", onclick: () => { only = null; filter(); } }, `pass rate ${only.title} ✕`));
  }

  async function open(row) {
    const id = `${words.problem[columns.problem[row]]}/${columns.step[row]}/${columns.sample[row]}`;
    history.replaceState(null, "", `#rollouts/${columns.run[row]}/${id}`);
    place.hidden = false;
    browser.classList.add("open");
    const facts = factsOf(page, columns, words, row);
    const head = [el("h3", {}, `step ${columns.step[row]}, sample ${columns.sample[row]} of problem `, el("code", {}, words.problem[columns.problem[row]]))];
    chosen = row;
    const text = await Promise.resolve(textOf(data, row)).catch((error) => ({ error }));
    if (chosen !== row) return; // another was chosen meanwhile
    if (text?.error) return place.replaceChildren(...head, factList(facts), el("p", { class: "note" }, text.error.message));
    if (!text) {
      place.replaceChildren(...head, factList(facts), el("p", { class: "note" }, "Its text is not in this page. To include it, write the page again with"), el("p", {}, el("code", {}, `--ids ${id}`)));
      return;
    }
    const said = text.header;
    facts.push(["answer", said.answer || "none"], ["expected", said.ground_truth ?? "not recorded"]);
    if (said.detail) facts.push(["verifier", said.detail]);
    if (said.versions) facts.push(["weights", said.versions.map((span) => `version ${span.version}${span.first_token ? ` from token ${span.first_token}` : ""}`).join(", ")]);
    const about = { tokens: columns.tokens[row], kept: Boolean(columns.kept[row]), advantage: columns.advantage[row], topAdvantage: page.topAdvantage };
    place.replaceChildren(...head, factList(facts), el("h3", {}, "prompt"), el("div", { class: "text prompt" }, visible(said.prompt ?? "not recorded")), el("h3", {}, "response"), ...responseView(text, about));
    if (innerWidth < 1250) place.scrollIntoView({ block: "nearest" });
  }

  page.browse = (run, problems, title) => {
    only = { run, problems, title };
    page.open("rollouts");
    filter();
  };
  page.onshown = [...page.onshown.filter((told) => told.name !== "filter"), filter];
  page.find = (run, id) => {
    const [problem, step, sample] = id.split("/");
    const code = words.problem.indexOf(problem);
    for (let row = 0; row < columns.step.length; row++) {
      if (columns.run[row] === run && columns.problem[row] === code && columns.step[row] === Number(step) && columns.sample[row] === Number(sample)) return table.choose(row);
    }
  };
  browser.append(table.root, place);
  filter();
  return [filters.root, ...notes, told, browser];
}

function tableColumns(page, columns, words) {
  const numeric = (title, name, width, hint, text = number) => ({ title, hint, width, number: true, text: (row) => text(columns[name][row]), order: (row) => columns[name][row] });
  const word = (title, name, width, hint) => ({ title, hint, width, text: (row) => words[name][columns[name][row]], order: (row) => words[name][columns[name][row]] });
  const there = (name) => columns[name].some((value) => !Number.isNaN(value));
  const found = [
    { title: "●", hint: "its text is in this page", width: 46, text: (row) => (columns.text[row] >= 0 ? "●" : ""), order: (row) => (columns.text[row] >= 0 ? 0 : 1) },
    numeric("step", "step", 62, "rollout step", String),
    word("problem", "problem", 96, "id of the problem"),
    numeric("no.", "sample", 50, "which of the group's samples", String),
    { ...word("status", "status", 92, "the verdict"), tone: (row) => words.status[columns.status[row]] },
    numeric("reward", "reward", 74, "reward"),
    numeric("tokens", "tokens", 78, "of the response", count),
    { title: "cut", hint: "truncated at the response limit T", width: 48, text: (row) => (columns.truncated[row] ? "yes" : ""), order: (row) => -columns.truncated[row], tone: () => "truncated" },
    { ...numeric("advantage", "advantage", 98, "of the response; none where its group was rejected"), text: (row) => (columns.kept[row] ? number(columns.advantage[row]) : "–"), order: (row) => (columns.kept[row] ? columns.advantage[row] : NaN) },
  ];
  if (there("log_prob")) found.push(numeric("log p", "log_prob", 78, "mean log-prob of its tokens by the engine, nats"));
  if (there("difference")) found.push(numeric("|diff|", "difference", 84, "mean |policy − engine| log-prob of its tokens, nats"));
  if (there("entropy")) found.push(numeric("entropy", "entropy", 84, "mean entropy of the policy at its tokens, nats"));
  if (there("seconds")) found.push(numeric("s", "seconds", 66, "seconds from request to last token"));
  found.push(word("stage", "stage", 90, "stage"), word("source", "source", 190, "data source of the problem"));
  if (live) found.shift(); // every text can be had
  if (page.runs.length > 1) found.splice(live ? 0 : 1, 0, { title: "run", hint: "run", width: 130, text: (row) => page.runs[columns.run[row]].label, order: (row) => columns.run[row] });
  return found;
}

function filterControls(page, columns, words, changed) {
  const root = el("div", { class: "controls", id: "filters" });
  const field = (title, node) => {
    node.addEventListener("input", changed);
    root.append(el("label", {}, title, node));
    return node;
  };
  const choice = (title, options) => field(title, el("select", {}, el("option", { value: "" }, "any"), ...options.map(([value, text]) => el("option", { value }, text))));
  const present = (name) => [...new Set(columns[name])].map((code) => [code, words[name][code]]).sort((a, b) => (a[1] < b[1] ? -1 : 1));
  const [least, most] = columns.step.reduce(([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, 0]);
  const from = field("steps", el("input", { type: "number", min: least, max: most, placeholder: least, "aria-label": "first step", style: "width:5.5rem" }));
  const to = field("to", el("input", { type: "number", min: least, max: most, placeholder: most, "aria-label": "last step", style: "width:5.5rem" }));
  const reward = choice("reward", [["1", "above 0"], ["0", "0 or less"]]);
  const cut = choice("truncated", [["1", "yes"], ["0", "no"]]);
  const source = choice("source", present("source"));
  const status = choice("status", present("status"));
  const stage = choice("stage", present("stage"));
  const problem = field("problem", el("input", { type: "text", placeholder: "id or part", style: "width:9rem" }));
  const full = field("", el("input", { type: "checkbox", id: "full" }));
  full.after("in full only");
  const reset = el("button", { type: "button", onclick: () => { for (const node of [from, to, reward, cut, source, status, stage, problem]) node.value = ""; full.checked = false; changed(); } }, "reset");
  root.append(reset);
  if (live) for (const node of [from, to, full]) node.closest("label").hidden = true; // it lists one step, and any text can be had
  return {
    root,
    /** Return the current filters as a function of the row. */
    test() {
      const [low, high] = [from.value === "" ? -Infinity : Number(from.value), to.value === "" ? Infinity : Number(to.value)];
      const part = problem.value.trim();
      const problems = part && new Set(words.problem.flatMap((id, code) => (id.includes(part) ? [code] : [])));
      return (row) =>
        columns.step[row] >= low && columns.step[row] <= high &&
        (reward.value === "" || (columns.reward[row] > 0) === (reward.value === "1")) &&
        (cut.value === "" || columns.truncated[row] === Number(cut.value)) &&
        (source.value === "" || columns.source[row] === Number(source.value)) &&
        (status.value === "" || columns.status[row] === Number(status.value)) &&
        (stage.value === "" || columns.stage[row] === Number(stage.value)) &&
        (!part || problems.has(columns.problem[row])) &&
        (!full.checked || columns.text[row] >= 0);
    },
  };
}

function factsOf(page, columns, words, row) {
  const word = (name) => words[name][columns[name][row]];
  const facts = [];
  if (page.runs.length > 1) facts.push(["run", page.runs[columns.run[row]].label]);
  facts.push(
    ["source", `${word("source") || "not recorded"}${word("stage") ? `, stage ${word("stage")}` : ""}`],
    ["verdict", `${word("status") || "not recorded"}, reward ${number(columns.reward[row])}`],
    ["advantage", columns.kept[row] ? number(columns.advantage[row]) : "0: the group was rejected"],
    ["length", `${plural(columns.tokens[row], "token")}${columns.truncated[row] ? ", truncated" : ""}; prompt ${count(columns.prompt_tokens[row])}`],
  );
  return facts;
}

const factList = (facts) => el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
