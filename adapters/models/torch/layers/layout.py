"""Layout of a packed batch for one forward pass: what sequences of a group begin with alike once.

A token's hidden state does not depend on what follows, so sequences that are equal up to some token need one copy of
it: the prompt of n samples, or the history that branches of a rollout share. The layout is a forest of tries: a *node*
is a run of tokens whose queries attend to the node's own tokens and to those of its prefix, wherever these lie. The
forward pass then costs the tokens of the tries instead of the sum of the sequences' lengths, with the same gradient.
For example, 8 samples of 100 tokens after one prompt of 300 cost 300 + 8 x 100 = 1,100 tokens, not 3,200.

Does not own: which tokens are shared (`domain.batches.prefixes`), nor attention itself (`attention.py`).
"""

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor, arange, cat, empty_like, tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.episodes.images import PlacedImage, PlacedImages

Span = tuple[int, int]
"""First token of a run of distinct tokens, and its length."""


@frozen
class Node:
    """`length` queries from `start`; their keys are the tokens of `prefix`, in its order, then their own."""

    start: int
    length: int
    prefix: tuple[Span, ...] = ()

    @property
    def prefix_length(self) -> int:
        """Number of tokens of the prefix."""
        return sum(length for _, length in self.prefix)

    @property
    def keys(self) -> int:
        """Length of the whole path."""
        return self.prefix_length + self.length

    def part(self, begin: int, end: int, first: int) -> "Node":
        """Returns the node of the queries `begin` to `end` (half-open), whose path begins at token `first` of this
        one's."""
        spans = (*self.prefix, (self.start, self.length))
        return Node(self.start + begin, end - begin, between(spans, first, self.prefix_length + begin))

    def path(self) -> Tensor:
        """Returns the index in M of each key."""
        return cat([arange(start, start + length) for start, length in (*self.prefix, (self.start, self.length))])


@frozen(kw_only=True, eq=False)
class Layout:
    """`M` distinct tokens standing for the `N` of a batch."""

    tokens_M: Tensor
    """Int64."""
    positions_M: Tensor
    """Int64."""
    index_N: Tensor
    """Index in M of each token of the batch."""
    nodes: tuple[Node, ...]
    """They tile M."""
    images: PlacedImages = ()
    """Images that stand among the tokens of M."""


def build_layout(batch: PackedBatch) -> Layout:
    """Lays out a batch, what sequences of one group begin with alike once."""
    prefixes = shared_prefixes(batch)
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    index_N = empty_like(batch.tokens_N)
    nodes: list[Node] = []
    tokens, positions = [], []
    images: list[PlacedImage] = []
    path: tuple[Span, ...] = ()
    size = 0
    for sequence, shared in zip(prefixes.order, prefixes.shared, strict=True):
        start, stop = starts[sequence], starts[sequence] + lengths[sequence]
        path = between(path, 0, shared)
        if own := lengths[sequence] - shared:
            nodes.append(Node(size, own, path))
            tokens.append(batch.tokens_N[start + shared : stop])
            positions.append(arange(shared, shared + own))
            images += [p.moved(size - shared) for p in batch.images_of(sequence) if p.start >= shared]
            path = (*path, (size, own))
            size += own
        index_N[start:stop] = cat([arange(first, first + length) for first, length in path])
    return Layout(
        tokens_M=cat(tokens),
        positions_M=cat(positions),
        index_N=index_N,
        nodes=tuple(nodes),
        images=tuple(images),
    )


def between(path: Sequence[Span], begin: int, end: int) -> tuple[Span, ...]:
    """Returns the tokens `begin` to `end` (half-open) of a path."""
    spans: list[Span] = []
    for start, length in path:
        first, last = max(begin, 0), min(end, length)
        if first < last:
            spans.append((start + first, last - first))
        begin, end = begin - length, end - length
    return tuple(spans)


def prefill_layout(
    prompts: Sequence[tuple[int, ...]], images: Sequence[PlacedImages] = ()
) -> tuple[Layout, list[Node]]:
    """Lays out independent prompts; their common beginning (a system prompt, a template's opening) is laid out once.

    Returns:
        The layout and, for each prompt, the node of its last tokens: its path is the whole prompt. At least one token
        of each prompt is its own.
    """
    shared = _common_prefix(prompts) if len(prompts) > 1 else 0
    # Equal tokens before an image, but not equal images.
    shared = min([shared, *(placed.start for own in images for placed in own[:1])])
    nodes = [Node(0, shared)] if shared else []
    tokens, size, leaves = list(prompts[0][:shared]), shared, []
    for prompt in prompts:
        leaves.append(Node(size, len(prompt) - shared, ((0, shared),) if shared else ()))
        tokens.extend(prompt[shared:])
        size += len(prompt) - shared
    nodes.extend(leaves)
    positions = [arange(node.prefix_length, node.keys) for node in nodes]
    layout = Layout(
        tokens_M=tensor(tokens),
        positions_M=cat(positions),
        index_N=arange(size),
        nodes=tuple(nodes),
        images=tuple(p.moved(leaf.start - shared) for leaf, own in zip(leaves, images, strict=False) for p in own),
    )
    return layout, leaves


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Returns the length of the prompts' common beginning, leaving each at least one token of its own."""
    first, last = min(prompts), max(prompts)  # all share what the first and last in sorted order share
    limit = min(len(prompt) for prompt in prompts) - 1
    for position in range(limit):
        if first[position] != last[position]:
            return position
    return limit
