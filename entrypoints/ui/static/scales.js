// Colour scales for values of tokens: a diverging one from orange (negative) over nothing (0) to blue (positive), and a
// sequential one. Each has few steps, which are CSS classes, so that 32,000 tokens are coloured without inline styles. Pure.

export const STEPS = 8; // of each arm of the diverging scale, and of the sequential one
const KEPT = 0.98; // share of values that are inside the scale; one outlier would make all others pale

/** Returns the scale of `values`, of which null is left out: `{ kind, low, high }`, or null if there is none.
 *
 * `kind` is "diverging" (symmetric around `centre`) or "sequential" (from the least to the greatest value).
 */
export function scaleOf(values, kind, centre = 0) {
  const known = values.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
  if (!known.length) return null;
  if (kind === "sequential") {
    known.sort((a, b) => a - b);
    const cut = Math.floor((known.length - 1) * (1 - KEPT));
    const [low, high] = [known[cut], known[known.length - 1 - cut]];
    return { kind, low: Math.min(low, high === low ? 0 : low), high };
  }
  const sizes = known.map((value) => Math.abs(value - centre)).sort((a, b) => a - b);
  const reach = sizes[Math.floor((sizes.length - 1) * KEPT)] || sizes[sizes.length - 1] || 1;
  return { kind, low: centre - reach, high: centre + reach };
}

/** Returns the class of a value: `p1`…`p8` above the centre, `n1`…`n8` below it, `q1`…`q8` sequential, "" for none. */
export function colour(value, scale) {
  if (value === null || value === undefined || Number.isNaN(value) || !scale) return "";
  const width = scale.high - scale.low;
  const place = width > 0 ? (Math.min(scale.high, Math.max(scale.low, value)) - scale.low) / width : 1;
  if (scale.kind === "sequential") return "q" + Math.max(1, Math.ceil(place * STEPS));
  const arm = Math.round((place * 2 - 1) * STEPS);
  if (arm === 0) return value === (scale.low + scale.high) / 2 ? "" : place > 0.5 ? "p1" : "n1";
  return arm > 0 ? "p" + arm : "n" + -arm;
}

/** Returns the legend of a scale: its classes from low to high, each with the value in its middle. */
export function legend(scale) {
  const parts = [];
  const width = scale.high - scale.low;
  if (scale.kind === "sequential") {
    for (let step = 1; step <= STEPS; step++) parts.push(["q" + step, scale.low + (width * (step - 0.5)) / STEPS]);
  } else {
    for (let arm = -STEPS; arm <= STEPS; arm++) {
      parts.push([arm ? (arm > 0 ? "p" : "n") + Math.abs(arm) : "", scale.low + (width * (arm / STEPS + 1)) / 2]);
    }
  }
  return parts;
}
