// Text that a model or a tool wrote, and numbers, in forms that are safe and pleasant to read. Pure.

const NAMED = {
  0x061c: "ALM", 0x200b: "ZWSP", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF",
  0x202d: "LRO", 0x202e: "RLO", 0x2028: "LS", 0x2029: "PS", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI",
  0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};
// Characters that draw nothing or change how others are drawn: controls but for tab and line feed, marks of direction,
// separators, invisible tags, and halves of surrogate pairs that stand alone. Joiners of emoji and of scripts stay.
const HIDDEN =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]|[\u{e0000}-\u{e007f}]|\p{Cs}/gu;

/** Returns `text` with every hidden character written out, such as `␛` or `⟨RLO⟩`. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "␡";
    return `⟨${NAMED[code] ?? "U+" + code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Returns the first characters of `text`, at most `length`, without half of one. */
export const cut = (text, length) => text.slice(0, length).replace(/[\ud800-\udbff]$/, text.length > length ? "" : "$&");

/** Returns the beginning of `text` on one line, at most `length` characters. */
export function oneLine(text, length = 200) {
  const line = visible(cut(text, length).replace(/\s+/g, " ").trim());
  return text.length > length ? line + "…" : line;
}

/** Returns a number with four significant digits, and `–` for none. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return (value + 0).toLocaleString("en-US"); // not -0
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size >= 1e7 || size < 1e-4 ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

/** Returns a number with its sign. */
export const signed = (value) => (value > 0 ? "+" : "") + number(value);

/** Returns a duration given in seconds, such as `3 min 20 s`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

/** Returns a number of bytes, such as `1.5 MiB`. */
export function bytes(count) {
  const power = count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${number(count / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
