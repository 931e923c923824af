// The page: tabs, runs to show and to hide, notes.

const TABS = [["overview", "Overview", overviewTab], ["metrics", "Metrics", metricsTab], ["behaviour", "Behaviour", behaviourTab], ["time", "Time", timesTab], ["lengths", "Lengths", lengthsTab], ["problems", "Problems", problemsTab], ["rollouts", "Rollouts", rolloutsTab], ["setup", "Setup", setupTab]];
const OF_ROWS = ["behaviour", "rollouts"]; // these tabs wait for the table of responses

function describe(page, rows) {
  const responses = page.runs.reduce((sum, run) => sum + run.responses, 0);
  const steps = Math.max(0, ...page.runs.map((run) => (run.steps.length ? run.steps[run.steps.length - 1] : 0)));
  document.getElementById("facts").textContent = `${plural(page.runs.length, "run")}, up to step ${count(steps)}, ${plural(responses, "response")} kept${page.runs.length === 1 ? `: ${page.runs[0].path}` : ""}`;
  const notes = [...rows.header.notes, ...page.runs.flatMap((run) => run.notes.map((note) => (page.runs.length > 1 ? `${run.label}: ${note}` : note)))];
  if (!notes.length) return;
  document.getElementById("notes").replaceChildren(el("details", { open: notes.length <= 3 }, el("summary", {}, notes.length === 1 ? "A note" : `${notes.length} notes`), el("ul", {}, ...notes.map((note) => el("li", {}, note)))));
}

function runButtons(page) {
  const place = document.getElementById("runs");
  page.runs.forEach((run, index) => {
    const button = el("button", { type: "button", "aria-pressed": "true", title: run.path }, el("span", { class: "dot", style: `background:${colourOf(index)}` }), run.label);
    button.addEventListener("click", () => {
      if (page.shown.has(index)) page.shown.delete(index);
      else page.shown.add(index);
      button.setAttribute("aria-pressed", page.shown.has(index));
      for (const section of document.querySelectorAll("section[data-run]")) section.hidden = !page.shown.has(Number(section.dataset.run));
      for (const plot of page.redraws) plot.redraw();
      for (const told of page.onshown) told();
    });
    place.append(button);
  });
}

function tabs(page) {
  const main = document.getElementById("main");
  main.replaceChildren();
  const panels = new Map();
  const buttons = TABS.map(([name, title]) => el("button", { type: "button", role: "tab", id: `tab-${name}`, onclick: () => page.open(name) }, title));
  document.getElementById("tabs").append(...buttons);
  page.open = async (name) => {
    tip.hide();
    TABS.forEach(([each], i) => buttons[i].setAttribute("aria-selected", each === name));
    if (!panels.has(name)) {
      const panel = el("div", { role: "tabpanel", "data-tab": name });
      panels.set(name, panel);
      main.append(panel);
      const [, , make] = TABS.find(([each]) => each === name);
      panel.append(...(await make(page)));
    }
    for (const [each, panel] of panels) panel.hidden = each !== name;
    if (!location.hash.startsWith(`#${name}`)) history.replaceState(null, "", `#${name}`);
  };
  page.browse = async (...what) => {
    await page.open("rollouts");
    page.browse(...what); // rolloutsTab has replaced it
  };
}

async function start() {
  const { header, columns } = await packet("head");
  const page = {
    runs: header.runs, metrics: header.metrics, passRates: header.pass_rates, columns,
    shown: new Set(header.runs.keys()), window: Math.max(0, ...header.runs.map((run) => run.steps.length)) > 20 ? 9 : 1,
    axis: "step", log: false, shares: false, redraws: [], onshown: [], topAdvantage: 0,
  };
  for (const run of page.runs) run.axes = axesOf(run);
  runButtons(page);
  tabs(page);
  const [wanted, run, ...id] = location.hash.slice(1).split("/");
  await page.open(TABS.some(([name]) => name === wanted) && !OF_ROWS.includes(wanted) ? wanted : "overview");
  performance.mark("curves");
  page.rows = packet("rows");
  const rows = await page.rows;
  page.topAdvantage = rows.columns.advantage.reduce((top, value) => (Math.abs(value) > top ? Math.abs(value) : top), 0);
  describe(page, rows);
  if (OF_ROWS.includes(wanted)) {
    await page.open(wanted);
    if (wanted === "rollouts" && id.length) page.find?.(Number(run), id.join("/"));
  }
  document.documentElement.dataset.ready = "yes";
}

function failed(error) {
  document.getElementById("notes").replaceChildren(el("p", {}, `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
}

start().catch(failed);
