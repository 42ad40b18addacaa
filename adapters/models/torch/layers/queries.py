"""Which queries of a layout a process attends with, where several divide them: each has pieces of its own, over all
keys.

A piece of a node is again a node: its queries see the node's path up to them. The later a query is, the more keys it
sees. So a long node is cut into two pieces for each process, one from either end (Dubey et al. 2024, "The Llama 3 Herd
of Models", section 3.3.2: a process has the i-th chunk and the i-th from the end); short ones are dealt whole.
Does not own: how keys come together (`sequence_parallel.py`), nor attention (`attention.py`).
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.models.torch.layers.layout import Layout, Node, Span, between

LARGE = (1, 2, 4, 8)
"""Nodes are cut that have at least the first, second, ... part of a process's tokens, until all have about the same to
do. Each piece needs all keys before it, so that the fewest are cut."""

SPREAD = 0.1
"""Largest difference between processes of what they have to do, as a share of the mean."""

Piece = tuple[Node, Span]
"""A node, and a run of its tokens."""


@frozen(kw_only=True, eq=False)
class Queries:
    """Queries of some tokens of a layout. Its M tokens are numbered anew: those with queries first, in their order,
    then all others.

    `nodes` tile the queries, `place_M` is the new number of each token.
    """

    nodes: tuple[Node, ...]
    place_M: Tensor

    @property
    def count(self) -> int:
        """Number of queries."""
        return sum(node.length for node in self.nodes)


def all_queries(layout: Layout) -> Queries:
    """Returns the queries of all tokens of a layout."""
    return Queries(nodes=layout.nodes, place_M=torch.arange(len(layout.tokens_M)))


def queries_of(pieces: Sequence[Piece], tokens: int) -> Queries:
    """Returns the queries of some pieces of a layout of `tokens` tokens."""
    asking = tokens_of(pieces)
    others_M = torch.ones(tokens, dtype=torch.bool).index_fill(0, asking, False)
    token_M = torch.cat([asking, others_M.nonzero()[:, 0]])
    place_M = torch.empty_like(token_M)
    place_M[token_M] = torch.arange(tokens)
    paths: dict[Node, tuple[Span, ...]] = {}
    nodes = []
    for node, (start, length) in sorted(pieces, key=lambda piece: piece[1]):
        if node not in paths:
            paths[node] = _spans(place_M[node.path()])
        prefix = between(paths[node], 0, node.prefix_length + start - node.start)
        nodes.append(Node(int(place_M[start]), length, prefix))
    return Queries(nodes=tuple(nodes), place_M=place_M)


def tokens_of(pieces: Sequence[Piece]) -> Tensor:
    """Returns the tokens of some pieces of a layout, in their order."""
    return torch.cat([torch.arange(start, start + length) for start, length in sorted(span for _, span in pieces)])


def _spans(numbers_K: Tensor) -> tuple[Span, ...]:
    """Returns the runs of consecutive numbers."""
    begins = torch.cat([torch.tensor([0]), (numbers_K.diff() != 1).nonzero()[:, 0] + 1])
    lengths = torch.diff(begins, append=torch.tensor([len(numbers_K)]))
    return tuple(zip(numbers_K[begins].tolist(), lengths.tolist(), strict=True))


def divided(nodes: Sequence[Node], parts: int) -> list[list[Piece]]:
    """Returns the pieces of each of `parts` parts, which are about equal in tokens and in the keys that these see. Each
    has at least 7/8 of its share of the tokens, less one."""
    pieces: list[list[Piece]] = []
    for large in LARGE:
        pieces = _dealt(nodes, parts, large)
        if all(_alike([*map(work, pieces)]) for work in (_tokens, _area)):
            break
    return pieces


def _alike(work: Sequence[int]) -> bool:
    return max(work) - min(work) <= SPREAD * sum(work) / len(work)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(length for _, (_, length) in pieces)


def _area(pieces: Sequence[Piece]) -> int:
    """Returns the keys that all queries of some pieces see."""
    return sum(
        length * (node.prefix_length + start - node.start) + length * (length + 1) // 2
        for node, (start, length) in pieces
    )


def _dealt(nodes: Sequence[Node], parts: int, large: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(parts)]
    held = [0] * parts
    least = sum(node.length for node in nodes) / (large * parts)
    turn = 0
    for node in (each for each in nodes if each.length >= least):
        size, over = divmod(node.length, parts)
        sizes = [size + ((part - turn) % parts < over) for part in range(parts)]
        turn += over
        # The last part's two pieces are neighbours, and so are one.
        runs = [*enumerate([*(own // 2 for own in sizes[:-1]), sizes[-1]])]
        runs += [(part, sizes[part] - sizes[part] // 2) for part in reversed(range(parts - 1))]
        start = node.start
        for part, length in runs:
            if length:
                pieces[part].append((node, (start, length)))
                held[part] += length
                start += length
    short = (each for each in nodes if each.length < least)
    for node in sorted(short, key=lambda each: each.length * each.keys, reverse=True):
        part = min(range(parts), key=held.__getitem__)
        pieces[part].append((node, (node.start, node.length)))
        held[part] += node.length
    return pieces
