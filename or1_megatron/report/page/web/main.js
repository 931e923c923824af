// The page: tabs, runs to show and to hide, notes.

const TABS = [["overview", "Overview", overviewTab], ["metrics", "Metrics", metricsTab], ["behaviour", "Behaviour", behaviourTab], ["time", "Time", timesTab], ["lengths", "Lengths", lengthsTab], ["problems", "Problems", problemsTab], ["rollouts", "Rollouts", rolloutsTab], ["setup", "Setup", setupTab]];
const COUNTED = ["behaviour", "lengths", "problems"]; // these tabs count over responses, and are drawn from them
const OF_ROWS = [...COUNTED, "rollouts"]; // these tabs wait for the table of responses

function describe(page, noted, responses = 0) {
  const steps = Math.max(0, ...page.runs.map((run) => (run.steps.length ? run.steps[run.steps.length - 1] : 0)));
  document.getElementById("facts").textContent = `${plural(page.runs.length, "run")}, up to step ${count(steps)}, ${live ? `${plural(page.kept.length, "file")} of responses` : plural(responses, "response")} kept${page.runs.length === 1 ? `: ${page.runs[0].path}` : ""}`;
  const notes = [...noted, ...page.runs.flatMap((run) => run.notes.map((note) => (page.runs.length > 1 ? `${run.label}: ${note}` : note)))];
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
  const fill = async (panel, name) => {
    const [, , make] = TABS.find(([each]) => each === name);
    try {
      panel.failed = false;
      const data = COUNTED.includes(name) ? await countedOf(page) : null;
      panel.replaceChildren(...(live && data ? [countedNote(page, data)] : []), ...(await make(page, data)));
    } catch (error) {
      if (!live) throw error;
      panel.failed = true; // so that the next try begins anew
      Object.assign(page, { rows: null, counts: null });
      panel.replaceChildren(el("p", { class: "note" }, error.message));
    }
  };
  /** Draw a tab anew: now if it is in view and `now`, else when it is opened. */
  page.renew = async (name, now = true) => {
    const panel = panels.get(name);
    if (panel && !panel.hidden && now) await fill(panel, name);
    if (!panel?.hidden) return;
    panels.delete(name);
    panel.remove();
  };
  page.open = async (name) => {
    tip.hide();
    TABS.forEach(([each], i) => buttons[i].setAttribute("aria-selected", each === name));
    if (!panels.has(name)) {
      const panel = el("div", { role: "tabpanel", "data-tab": name });
      panels.set(name, panel);
      main.append(panel);
      await fill(panel, name);
    } else if (panels.get(name).failed) await fill(panels.get(name), name);
    for (const [each, panel] of panels) panel.hidden = each !== name;
    if (!location.hash.startsWith(`#${name}`)) history.replaceState(null, "", `#${name}`);
  };
  page.browse = async (...what) => {
    await page.open("rollouts");
    page.browse(...what); // rolloutsTab has replaced it
  };
}

async function start() {
  const { header } = await packet("head");
  const page = {
    runs: header.runs, metrics: header.metrics,
    version: header.version, kept: header.kept, step: null, rows: null, counts: null, onnew: [],
    shown: new Set(header.runs.keys()), window: Math.max(0, ...header.runs.map((run) => run.steps.length)) > 20 ? 9 : 1,
    axis: "step", log: false, shares: false, redraws: [], onshown: [], topAdvantage: 0,
  };
  for (const run of page.runs) run.axes = axesOf(run);
  runButtons(page);
  tabs(page);
  const [wanted, run, ...id] = location.hash.slice(1).split("/");
  if (id.length) page.step = Number(id[1]);
  await page.open(TABS.some(([name]) => name === wanted) && !OF_ROWS.includes(wanted) ? wanted : "overview");
  performance.mark("curves");
  const { header: { notes }, columns } = live ? { header: { notes: [] } } : await allRows(page);
  describe(page, notes, columns?.step.length);
  if (OF_ROWS.includes(wanted)) {
    await page.open(wanted);
    if (wanted === "rollouts" && id.length) page.find?.(Number(run), id.join("/"));
  }
  document.documentElement.dataset.ready = "yes";
  if (live) follow(page);
}

function failed(error) {
  document.getElementById("notes").replaceChildren(el("p", {}, `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
}

start().catch(failed);
