// The page of `or1 watch`: asks its server for what is new while the page is in view, and shows it.

const POLL_MS = 3000;

/** Return the element that `make()` returns; it is made anew when the run goes on. */
function current(page, make) {
  let node = make();
  page.onnew.push(() => {
    const next = make();
    next.open = node.open;
    node.replaceWith(next);
    node = next;
  });
  return node;
}

/** Return a note that says over which steps is counted; the written page counts over all that it lists. */
function countedNote(page, { columns }) {
  const of = page.runs.map(({ label }, index) => {
    const counted = new Set(columns.step.filter((_, row) => columns.run[row] === index)).size;
    const kept = new Set(page.kept.filter((file) => file.startsWith(`${index}/`)).map((file) => file.split("/")[2])).size;
    return `${page.runs.length > 1 ? `${label}: ` : ""}${count(counted)} of ${plural(kept, "step")}`;
  });
  return el("p", { class: "note" }, `Counted when this part was opened, over the responses kept of ${of.join("; ")}.`);
}

/** Take a packet's facts of each run. */
function take(page, header) {
  page.runs.forEach((run, index) => {
    Object.assign(run, header.runs[index]);
    run.axes = axesOf(run);
  });
  addBehaviour(page);
}

const zoomed = (plot) => plot && (plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1));

/** Show a newer packet of curves. What somebody reads or has zoomed into stays as it is. */
function renew(page, { header }) {
  const shape = ({ metrics, runs }) => JSON.stringify([metrics.map(([name]) => name), runs.map((run) => run.sessions.length)]);
  const same = shape(page) === shape(header);
  const responses = String(page.kept) !== String(header.kept);
  take(page, header);
  Object.assign(page, { version: header.version, kept: header.kept, metrics: header.metrics });
  describe(page, []);
  if (same) {
    for (const fresh of page.onnew) fresh();
    for (const plot of page.redraws) if (!zoomed(plot.chart)) plot.redraw();
  } else {
    Object.assign(page, { onnew: [], redraws: [] });
    for (const name of ["overview", "metrics", "time", "setup"]) page.renew(name);
  }
  if (responses) {
    page.counts = null;
    for (const name of COUNTED) page.renew(name, false);
  }
  const read = document.querySelector("[data-tab=rollouts]");
  if (responses && page.step === null && !read?.contains(document.activeElement) && !read?.querySelector("#detail:not([hidden])")) {
    page.rows = null;
    page.renew("rollouts");
  }
}

/** Ask for new steps until the page is closed; never while it is hidden. */
async function follow(page) {
  const told = el("p", { id: "live", role: "status" });
  document.getElementById("facts").after(told);
  for (;;) {
    let state = "live";
    try {
      const fresh = await packet("head", { version: page.version });
      if (fresh) renew(page, fresh);
    } catch (error) {
      state = `not live: ${error.message}`;
    }
    if (told.textContent !== state) told.textContent = state;
    told.classList.toggle("off", state !== "live");
    await new Promise((done) => setTimeout(done, POLL_MS));
    while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
  }
}

/** Return the responses of all files of the step chosen, or of the newest. */
function responsesOfStep(page) {
  const steps = [...new Set(filesOf(page).map(([, , , step]) => Number(step)))].sort((a, b) => a - b);
  const step = page.step ?? steps.at(-1);
  page.rows ??= responsesOf(page, filesOf(page).filter((file) => Number(file[3]) === step).map(([file]) => file));
  return [steps, step];
}

/** Return the controls that choose the step whose responses are listed; the newest until somebody chooses. */
function stepControl(page, steps, step) {
  const go = async (to, control) => {
    Object.assign(page, { step: to, rows: null });
    await page.renew("rollouts");
    document.getElementById(control)?.focus();
  };
  const at = steps.indexOf(step);
  const input = el("input", { id: "step", type: "number", value: step, min: steps[0], max: steps.at(-1), style: "width:6rem", onchange: () => go(steps.findLast((each) => each <= Number(input.value)) ?? steps[0], "step") });
  const button = (id, text, to) => el("button", { id, type: "button", disabled: to === undefined, onclick: () => go(to, id) }, text);
  return el("span", { class: "controls" }, el("label", {}, "responses of step", input), button("earlier", "◀ earlier", steps[at - 1]), button("later", "later ▶", steps[at + 1]), button("newest", "newest", page.step === null ? undefined : null));
}
