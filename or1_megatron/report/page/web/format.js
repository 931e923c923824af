// Formats numbers, ticks of axes and durations for people.

/** uPlot reads the language when it loads. A browser's own may be one that Intl refuses (en-US@posix). */
const navigator = { language: "en" };

/** Return three significant digits, without exponent between 0.0001 and ten million. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4 || size >= 1e7) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (size >= 1000) return Math.round(value).toLocaleString("en").replace("-", "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** Return the label of a tick, as short as the step between ticks allows. */
function tickText(value, step) {
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e").replaceAll("-", "−");
  if (Math.abs(value) >= 10000) return `${Number((value / 1000).toPrecision(4))}k`.replace("-", "−");
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return String(Number(value.toFixed(digits + 1))).replace("-", "−");
}

const count = (value) => value.toLocaleString("en");
const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : "–");

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 99.95) return `${number(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
