/** Numbers as people read them. Unknown (null, undefined, NaN) is a dash, never a zero. */

export const DASH = "–";
const known = (value) => value != null && Number.isFinite(value);

/** 12,345 */
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : DASH);

/** Three digits that matter: 1.23, 12.3, 123. */
export function figure(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2 });
}

/** 134.5 M */
export function large(value) {
  if (!known(value)) return DASH;
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${figure(value / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return count(value);
}

/** 1.5 GiB */
export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${figure(value / 1024 ** power)} ${units[power]}`;
}

/** 12.3 ms, 1.5 s, 2 min 5 s */
export function seconds(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${figure(value * 1e6)} µs`;
  if (value < 1) return `${figure(value * 1e3)} ms`;
  if (value < 120) return `${figure(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export const percent = (part, whole) => (known(part) && whole > 0 ? `${figure((100 * part) / whole)}%` : DASH);

/** 14:03:59 */
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** One or many: plural(2, "token") is "2 tokens". */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
