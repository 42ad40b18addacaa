// A group's rollouts as a tree: what they have in common once, and branches where they differ. Pure.

/** Returns the tree of `sequences` (lists of token ids): `{ from, to, members, children }`. A node's tokens are those of
 * any of its members from `from` to `to`; `members` are indices of sequences; a node without children is a leaf, and
 * equal sequences share one. A sequence that ends where others go on has a leaf without tokens. */
export function treeOf(sequences) {
  return sequences.length ? node(sequences, sequences.map((_, index) => index), 0) : null;
}

function node(sequences, members, from) {
  let to = from;
  const first = sequences[members[0]];
  while (to < first.length && members.every((m) => sequences[m].length > to && sequences[m][to] === first[to])) to++;
  const parts = new Map(); // by next token; undefined: the sequence ends here
  for (const member of members) {
    const next = sequences[member][to];
    parts.set(next, [...(parts.get(next) ?? []), member]);
  }
  const children = parts.size === 1 ? [] : [...parts.values()].map((part) => node(sequences, part, to));
  children.sort((a, b) => b.members.length - a.members.length);
  return { from, to, members, children };
}
