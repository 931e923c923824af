// Reads the page's data: packets of encoding.py, embedded as gzip in base64, or fetched from the server of `or1 watch`.

/** Whether a server feeds the page. */
const live = !document.getElementById("data-head");

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, float32: Float32Array };

/** Resolves when the whole page is parsed. Texts follow this script, so that the rest is drawn before them. */
const parsed = new Promise((done) => (document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", done) : done()));

/** Return the bytes of a packet in this page. */
async function embedded(name) {
  if (!document.getElementById(`data-${name}`)) await parsed;
  const element = document.getElementById(`data-${name}`);
  if (!element) throw new Error(`the page has no data '${name}': it is not whole`);
  const text = atob(element.textContent);
  return Uint8Array.from(text, (char) => char.charCodeAt(0));
}

/** Return the server's packet; null when it says that nothing is new. Throws with what the server says. */
async function asked(name, parameters) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams([...new URLSearchParams(location.search), ...known]);
  const answer = await fetch(`data/${name}?${query}`).catch(() => { throw new Error("or1 watch has ended, or cannot be reached"); });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.status === 204 ? null : answer.blob();
}

/** Return {header, columns} of a packet; `parameters` are for the server. */
async function packet(name, parameters = {}) {
  const content = await (live ? asked(name, parameters) : embedded(name));
  if (content === null) return null;
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new Uint32Array(buffer, 0, 1)[0];
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  for (const [column, [kind, first, size]] of Object.entries(header.columns)) {
    columns[column] = new ARRAYS[kind](buffer, 4 + length + first, size);
  }
  return { header, columns };
}

/** Return the text of a row of the responses, or null if it is not in the page. */
function textOf({ columns, of }, row) {
  if (columns.text[row] < 0) return null;
  return live ? packet("text", { of, row: columns.text[row] }) : packet(`text-${columns.text[row]}`);
}

/** Return all responses that the written page lists. */
const allRows = (page) => (page.rows ??= packet("rows").then((data) => rated(page, data)));

/** Return the responses of these rollout files, {header, columns, of}; the written page has those of all. */
async function responsesOf(page, files) {
  if (!live) return allRows(page);
  const of = files.join();
  return { ...rated(page, await packet("rows", { of })), of };
}

/** Return the responses over which is counted, with their behaviour: in the written page those that it lists. */
function countedOf(page) {
  if (!live) return allRows(page);
  return (page.counts ??= packet("counts"));
}

/** Return [[file, run, folder, step]] of the rollout files that are kept; the written page knows them by their responses. */
function filesOf(page, data) {
  if (!live) {
    const { header, columns } = data;
    const heldOut = header.words.stage.indexOf("held-out");
    page.kept ??= [...new Set(Array.from(columns.step, (step, row) => `${columns.run[row]}/${columns.stage[row] === heldOut ? "evaluations" : "rollouts"}/${step}`))];
  }
  return page.kept.map((file) => [file, ...file.split("/")]);
}
