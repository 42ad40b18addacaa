// Differences of two texts, word by word (Myers, "An O(ND) Difference Algorithm", 1986). Pure.

const MOST_EDITS = 1500; // beyond which the rest counts as replaced: time and memory grow with their square

/** Returns `[kind, text]` pairs: kind 0 is in both texts, -1 in the first alone, 1 in the second alone. */
export function wordDiff(before, after) {
  const [a, b] = [words(before), words(after)];
  let [start, endA, endB] = [0, a.length, b.length];
  while (start < endA && start < endB && a[start] === b[start]) start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) endA--, endB--;
  const parts = [];
  const add = (kind, text) => {
    if (!text) return;
    if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1] += text;
    else parts.push([kind, text]);
  };
  add(0, a.slice(0, start).join(""));
  for (const [kind, word] of middle(a.slice(start, endA), b.slice(start, endB))) add(kind, word);
  add(0, a.slice(endA).join(""));
  return parts;
}

const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

function middle(a, b) {
  const reach = Math.min(a.length + b.length, MOST_EDITS);
  const furthest = new Int32Array(2 * reach + 3);
  const trace = [];
  for (let edits = 0; edits <= reach; edits++) {
    trace.push(furthest.slice(reach - edits, reach + edits + 3));
    for (let diagonal = -edits; diagonal <= edits; diagonal += 2) {
      const at = diagonal + reach + 1;
      const down = diagonal === -edits || (diagonal !== edits && furthest[at - 1] < furthest[at + 1]);
      let x = down ? furthest[at + 1] : furthest[at - 1] + 1;
      while (x < a.length && x - diagonal < b.length && a[x] === b[x - diagonal]) x++;
      furthest[at] = x;
      if (x >= a.length && x - diagonal >= b.length) return walkBack(a, b, trace);
    }
  }
  return [[-1, a.join("")], [1, b.join("")]];
}

function walkBack(a, b, trace) {
  const parts = [];
  let [x, y] = [a.length, b.length];
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const furthest = (diagonal) => trace[edits][diagonal + edits + 1];
    const diagonal = x - y;
    const down = diagonal === -edits || (diagonal !== edits && furthest(diagonal - 1) < furthest(diagonal + 1));
    const startX = edits === 0 ? 0 : furthest(down ? diagonal + 1 : diagonal - 1) + (down ? 0 : 1);
    while (x > startX) {
      parts.push([0, a[--x]]);
      y--;
    }
    if (edits === 0) break;
    if (down) parts.push([1, b[--y]]);
    else parts.push([-1, a[--x]]);
  }
  return parts.reverse();
}
