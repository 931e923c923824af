// One response in full: its tokens, shaded by the numbers of engine and policy.

const CHUNK_TOKENS = 2000;

/** strength(value): what is shaded. Those with `minus` have a colour for each sign. */
const SHADES = {
  "engine log-prob": { column: "log_prob", colour: "217 72 15", told: "−log p by the engine: how surprising the token was", strength: (value) => -value },
  "log-prob difference": { column: "difference", colour: "47 111 222", minus: "217 72 15", told: "policy less engine; blue: the policy gives the token more", strength: (value) => value },
  entropy: { column: "entropy", colour: "112 72 198", told: "entropy of the policy's whole distribution at the token", strength: (value) => value },
  advantage: { column: null, colour: "43 138 94", minus: "194 37 92", told: "of the whole response: green is reinforced, red discouraged" },
};

/** Return the size at which a shade is full: 99 of 100 tokens stay below it. */
function topOf(values, strength) {
  const sizes = Float64Array.from(values, (value) => Math.abs(strength(value))).filter(Number.isFinite).sort();
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.99 * sizes.length))] || sizes[sizes.length - 1] : 0;
}

/** Return {colour(i), part(i), negative(i), shade, top} for a mode, or {missing: why}. */
function shading(mode, text, row) {
  const shade = SHADES[mode];
  if (!shade) return { colour: () => "", strength: () => 0 };
  let strength;
  let top;
  if (shade.column === null) {
    if (!row.kept) return { missing: "The group was rejected: its advantages are zero, and nothing was trained on." };
    strength = () => row.advantage;
    top = Math.max(1e-9, row.topAdvantage);
  } else {
    const values = text.columns[shade.column];
    if (!values) return { missing: shade.column === "log_prob" ? "The run has not recorded it." : row.kept ? "Not recorded: an older version wrote the run, or the step did not measure it." : "The group was rejected: the policy was not trained on it, and did not measure it." };
    strength = (i) => shade.strength(values[i]);
    top = topOf(values, shade.strength);
  }
  const part = (i) => Math.min(1, Math.abs(strength(i)) / (top || 1));
  const colour = (i) => {
    const size = strength(i);
    if (!Number.isFinite(size)) return "repeating-linear-gradient(45deg, var(--soft) 0 2px, transparent 2px 5px)";
    return `rgb(${size < 0 && shade.minus ? shade.minus : shade.colour} / ${(0.72 * part(i)).toFixed(3)})`;
  };
  return { colour, top, shade, part: (i) => (Number.isFinite(strength(i)) ? part(i) : 1), negative: (i) => strength(i) < 0 };
}

/** Show control characters as symbols and marks that change the direction as ◌, all of the same length as before. */
const visible = (text) => text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "◌").replace(/[\0-\x08\x0b-\x1f\x7f]/g, (char) => String.fromCharCode(char === "\x7f" ? 0x2421 : 0x2400 + char.charCodeAt(0)));

function responseView(text, row) {
  const content = visible(text.header.response ?? "");
  const units = text.columns.units;
  const tokens = row.tokens;
  const starts = new Uint32Array(tokens + 1);
  if (units) units.forEach((size, i) => { starts[i + 1] = starts[i] + size; });
  const body = el("div", { class: "text tokens" });
  const strip = el("canvas", { class: "strip", title: "the whole response; a click goes there" });
  const scale = el("div", { class: "scale" });
  const select = el("select", { "aria-label": "shading" }, ...[...Object.keys(SHADES), "none"].map((mode) => el("option", { value: mode }, mode)));
  let nodes = [];

  function values(i) {
    const of = (column) => (text.columns[column] ? number(text.columns[column][i]) : "–");
    const piece = units ? JSON.stringify(content.slice(starts[i], starts[i + 1])) : "";
    return `token ${i + 1} of ${tokens} ${piece}\nengine log-prob ${of("log_prob")}\npolicy − engine ${of("difference")}\nentropy ${of("entropy")}\nadvantage ${row.kept ? number(row.advantage) : "– (group rejected)"}`;
  }

  function write() {
    if (!units) return body.replaceChildren(content);
    nodes = new Array(tokens);
    body.replaceChildren();
    let at = 0;
    const more = () => {
      const made = document.createDocumentFragment();
      for (const end = Math.min(tokens, at + CHUNK_TOKENS); at < end; at++) {
        const piece = content.slice(starts[at], starts[at + 1]);
        const node = document.createElement("b");
        node.textContent = piece;
        node.dataset.i = at;
        if (!piece) node.className = "part";
        else if (/^<[|｜].*[|｜]>$|^<\/?\w+>$|^<\/?s>$/.test(piece)) node.className = "special";
        else if (/^\n/.test(piece)) node.className = "line";
        nodes[at] = node;
        made.append(node);
      }
      body.append(made);
      shadeNodes(at - made.childNodes.length);
      if (at < tokens && body.isConnected) requestAnimationFrame(more);
      else shadeNodes(0);
    };
    more();
  }

  let shaded = shading("none", text, row);
  function shadeNodes(from) {
    for (let i = from; i < nodes.length && nodes[i]; i++) nodes[i].style.background = shaded.missing ? "" : shaded.colour(i);
  }

  function drawStrip() {
    const width = Math.max(1, strip.clientWidth);
    strip.width = width * devicePixelRatio;
    strip.height = 34 * devicePixelRatio;
    const pen = strip.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    if (shaded.missing || !shaded.part || !tokens) return;
    const per = tokens / width;
    for (let x = 0; x < width; x++) {
      let best = Math.floor(x * per);
      for (let i = best; i < Math.min(tokens, Math.max(best + 1, Math.floor((x + 1) * per))); i++) if (shaded.part(i) > shaded.part(best)) best = i;
      const high = 2 + 30 * shaded.part(best);
      pen.fillStyle = `rgb(${shaded.negative(best) && shaded.shade.minus ? shaded.shade.minus : shaded.shade.colour})`;
      pen.fillRect(x, 34 - high, 1, high);
    }
  }

  function shade() {
    shaded = shading(select.value, text, row);
    const { shade: kind, top, missing } = shaded;
    scale.replaceChildren();
    if (missing) scale.append(missing);
    else if (kind) {
      const full = `rgb(${kind.colour} / .72)`;
      const from = kind.minus ? `rgb(${kind.minus} / .72), transparent, ${full}` : `transparent, ${full}`;
      scale.append(kind.minus ? `−${number(top)}` : "0", el("i", { style: `background:linear-gradient(90deg, ${from})` }), `${number(top)}${kind.column ? " nats" : ""}`, el("span", {}, kind.told));
    }
    strip.hidden = Boolean(missing) || !kind || kind.column === null;
    shadeNodes(0);
    if (!strip.hidden) drawStrip();
  }

  body.addEventListener("pointermove", (event) => {
    const at = event.target.dataset?.i;
    if (at === undefined) tip.hide();
    else tip.show(event, values(Number(at)));
  });
  body.addEventListener("pointerleave", tip.hide);
  const pointed = (event) => Math.max(0, Math.min(tokens - 1, Math.floor((event.offsetX / strip.clientWidth) * tokens)));
  strip.addEventListener("pointermove", (event) => tip.show(event, values(pointed(event))));
  strip.addEventListener("pointerleave", tip.hide);
  strip.addEventListener("click", (event) => nodes[pointed(event)]?.scrollIntoView({ block: "center", behavior: "smooth" }));
  select.addEventListener("change", () => { responseView.mode = select.value; shade(); });
  new ResizeObserver(() => strip.hidden || drawStrip()).observe(strip);

  select.value = responseView.mode ?? "engine log-prob";
  write();
  queueMicrotask(shade);
  const note = units ? [] : [el("p", { class: "note" }, "The texts of single tokens are unknown (no tokenizer): the strip shows their values, but the text is not shaded.")];
  return [el("div", { class: "controls" }, el("label", {}, "shading", select)), scale, strip, ...note, body];
}
