// The page's data: packets of gzip in base64, written by embedding.py.

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, float32: Float32Array };

/** Resolves when the whole page is parsed. Texts follow this script, so that the rest is drawn before them. */
const parsed = new Promise((done) => (document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", done) : done()));

/** Return {header, columns} of a packet in this page. */
async function packet(name) {
  if (!document.getElementById(`data-${name}`)) await parsed;
  const element = document.getElementById(`data-${name}`);
  if (!element) throw new Error(`the page has no data '${name}': it is not whole`);
  const text = atob(element.textContent);
  const bytes = Uint8Array.from(text, (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
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
const textOf = (columns, row) => (columns.text[row] < 0 ? null : packet(`text-${columns.text[row]}`));
