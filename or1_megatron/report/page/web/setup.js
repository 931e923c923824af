// What the runs were made with: where, when, with which code, and their configurations.

/** Return {dotted key: JSON} of the leaves of a configuration; an empty list or object is a leaf. */
function leavesOf(value, key = "") {
  const inner = value !== null && typeof value === "object" ? Object.entries(value) : [];
  if (!inner.length) return { [key]: JSON.stringify(value) };
  return Object.assign({}, ...inner.map(([name, child]) => leavesOf(child, key ? `${key}.${name}` : name)));
}

/** Return a table with a column per run; rows: [[title, value of each run]]. */
function tableOfRuns(page, rows) {
  const head = el("tr", {}, el("th", {}, ""), ...page.runs.map((run) => el("th", {}, run.label)));
  const lines = rows.map(([title, values]) => el("tr", {}, el("td", {}, title), ...values.map((value) => el("td", { class: "value" }, value ?? "–"))));
  return el("div", { class: "wide" }, el("table", { class: "setup" }, head, ...lines));
}

function setupTab(page) {
  const last = page.runs.map((run) => run.sessions.at(-1) ?? {});
  const names = [...new Set(last.flatMap(Object.keys))];
  const facts = [["folder", page.runs.map((run) => run.path)], ["sessions", page.runs.map((run) => (run.sessions.length ? count(run.sessions.length) : null))]];
  facts.push(["first began", page.runs.map((run) => run.sessions[0]?.date)]);
  for (const name of names) facts.push([name === "date" ? "last began" : name, last.map((session) => session[name])]);
  const parts = [el("h2", {}, "Code, place and date of the last session"), tableOfRuns(page, facts)];
  const flat = page.runs.map((run) => leavesOf(run.config));
  const keys = [...new Set(flat.flatMap(Object.keys))].filter(Boolean);
  if (!keys.length) return [...parts, el("p", { class: "note" }, "No configuration is recorded.")];
  const rows = keys.map((key) => [key, flat.map((each) => each[key])]);
  if (page.runs.length > 1) {
    const apart = rows.filter(([, values]) => values.some((value) => value !== values[0]));
    parts.push(el("h2", {}, "Differences in configuration"), apart.length ? tableOfRuns(page, apart) : el("p", { class: "note" }, "None: all keys have the same values."));
  }
  parts.push(el("details", { open: page.runs.length === 1 }, el("summary", {}, `The whole configuration, ${count(keys.length)} keys`), tableOfRuns(page, rows)));
  return parts;
}
