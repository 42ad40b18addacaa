"""Linear attention, state spaces and convolutions over a forest of nodes (`layout.py`), each token after its path.

A convolution takes a token's predecessors from wherever they lie, in one row for all nodes. A recurrence hands a state
from token to token: nodes are cut into *segments* where others branch off, and each segment begins with the state at
the end of the one before it. Segments that wait for no other are computed together, as rows filled up on the right with
zeros, which leave the state as it is. Segments that no other waits for come last, so that replies to one prompt are
rows of one call, wherever they part.
Does not own: what a row computes (`recurrent_layers.py`), nor how processes share a forest (`shared_recurrence.py`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.row_widths import row_widths
from rollgrad.adapters.models.torch.layers.layout import Node

Convolution = Callable[[Tensor], Tensor]
"""Causal convolution of rows [R, C, T], of the same shape."""

Scan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""Computes rows: takes columns [R, T, ..] and the state [R, ..] before each (None is one of zeros), and returns results
[R, T, ..] and the state after each."""


class Recurrence(Protocol):
    """Decides, for one forward pass, what each token comes after."""

    stepping: bool
    """Whether it is a step of decoding: each row has one token, and there are no gradients."""
    key_copies: int = 1
    """How many neighbouring heads of queries and keys are known to be copies of one; the others are then left out."""

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Returns the convolution of x [B, C, T]; a token sees itself and `width` - 1 before it."""
        ...

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Returns the results [B, T, heads, ..] of a recurrence over columns [B, T, heads, ..], whose zeros leave its
        state as it is. Heads are those of the first column; in others neighbours may share what is there once."""
        ...

    def of_heads(self, x_H: Tensor) -> Tensor:
        """Returns the rows of the heads that `scan` is given, of a tensor with one row a head."""
        return x_H


@frozen
class Segment:
    """`length` tokens of M from `start`, after those of the segment `parent`, by its number; None begins a sequence."""

    start: int
    length: int
    parent: int | None


def segments(nodes: Sequence[Node]) -> list[Segment]:
    """Cuts nodes where others branch off; a segment comes after its parent."""
    cuts: dict[int, set[int]] = {node.start: {node.length} for node in nodes}
    for node in nodes:
        if node.prefix:
            start, length = node.prefix[-1]
            cuts[start].add(length)
    found: list[Segment] = []
    ends: dict[tuple[int, int], int] = {}
    for node in nodes:
        parent = ends[node.prefix[-1]] if node.prefix else None
        for begin, end in itertools.pairwise([0, *sorted(cuts[node.start])]):
            found.append(Segment(node.start + begin, end - begin, parent))
            parent = ends[node.start, end] = len(found) - 1
    return found


class Neighbours:
    """The token before each of M distinct tokens, on its path; M stands for none.

    Args:
        nodes: tile M.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.tokens = sum(node.length for node in nodes)
        """The number M."""
        self._before_M = torch.arange(-1, self.tokens)
        self._before_M[-1] = self.tokens
        starts = [node.start for node in nodes]
        self._before_M[starts] = torch.tensor([sum(n.prefix[-1]) - 1 if n.prefix else self.tokens for n in nodes])

    def last(self, ends_E: Tensor, count: int) -> Tensor:
        """Returns the last `count` tokens [E, count] of the paths that end with tokens."""
        found = [ends_E]
        while len(found) < count:
            found.append(self._before_M[found[-1]])
        return torch.stack(found[:count][::-1], 1)

    def row(self, token_C: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns a row of some tokens, in ascending order, in which those before them come before them: the `count`
        before each run of neighbours in front of it; and the place of each of the tokens in it."""
        begins_C = self._before_M[token_C] != torch.cat([torch.tensor([-1]), token_C[:-1]])
        place_C = torch.arange(len(token_C)) + count * begins_C.cumsum(0)
        token_R = torch.empty(len(token_C) + count * int(begins_C.sum()), dtype=torch.int64)
        token_R[place_C] = token_C
        if count:
            token_R[place_C[begins_C, None] + torch.arange(-count, 0)] = self.last(
                self._before_M[token_C[begins_C]], count
            )
        return token_R, place_C


class ForestRecurrence(Recurrence):
    """The recurrence of a forest; B is 1 and T is the M of the layout."""

    stepping = False

    def __init__(self, nodes: Sequence[Node], *, device: torch.device) -> None:
        self._nodes, self.device = nodes, device
        self._tokens = sum(node.length for node in nodes)
        self._rows: dict[int, tuple[CopiedRows, CopiedRows]] = {}
        self.calls = 0
        """How often layers called it."""
        self.heads = 0
        """Greatest common divisor of the heads of all layers that scanned; 0 if none has."""

    @cached_property
    def _neighbours(self) -> Neighbours:
        return Neighbours(self._nodes)

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`: one row of all nodes, each after the last tokens of its prefix."""
        self.calls += 1
        if len(self._nodes) == 1:
            return convolution(x)
        tokens, results = self._row(width - 1)
        padded_MC = functional.pad(x[0].transpose(0, 1), (0, 0, 0, 1))
        row = tokens.of(padded_MC).transpose(0, 1)[None]
        return results.of(convolution(row)[0].transpose(0, 1)).transpose(0, 1)[None]

    def _row(self, before: int) -> tuple[CopiedRows, CopiedRows]:
        """Returns what makes a row of all tokens, each after the `before` ones before it, and what takes each token's
        result from that row."""
        if before not in self._rows:
            token_R, place_M = self._neighbours.row(torch.arange(self._tokens), before)
            tokens = CopiedRows(token_R, self.device, token_R < self._tokens)
            self._rows[before] = tokens, CopiedRows(place_M, self.device)
        return self._rows[before]

    @cached_property
    def _segments(self) -> list[Segment]:
        return segments(self._nodes)

    @cached_property
    def _calls(self) -> "tuple[list[_Call], CopiedRows]":
        """The calls in their order, and what takes each token's result from theirs, end to end."""
        calls = [*_ordered(self._segments, self._tokens, self.device)]
        token_R = torch.cat([call.token_R for call in calls])
        real = token_R < self._tokens
        place_M = torch.empty(self._tokens, dtype=torch.int64)
        place_M[token_R[real]] = real.nonzero()[:, 0]
        return calls, CopiedRows(place_M, self.device)

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Implements `Recurrence.scan`."""
        return self.scan_to_ends(scan, columns)[0]

    def scan_to_ends(self, scan: Scan, columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the results of `scan`, and the states after the segments of each call."""
        self.calls += 1
        self.heads = math.gcd(self.heads, columns[0].shape[2])
        calls, in_order = self._calls
        padded = [torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]) for x in columns]
        results: list[Tensor] = []
        states: list[Tensor] = []
        for call in calls:
            rows = [call.tokens.of(x).view(call.rows, -1, *x.shape[1:]) for x in padded]
            result, after = scan(rows, call.before([s for s, c in zip(states, calls, strict=False) if c.goes_on]))
            results.append(result.flatten(0, 1))
            states.append(after)
        return in_order.of(torch.cat(results))[None], states

    def ends(self, nodes: Sequence[Node]) -> Tensor:
        """Returns where the states after nodes are when those of `scan_to_ends` are laid end to end, on the CPU."""
        calls, _ = self._calls
        stops = [self._segments[n].start + self._segments[n].length for call in calls for n in call.members]
        places = {stop: place for place, stop in enumerate(stops)}
        return torch.tensor([places[node.start + node.length] for node in nodes])

    def last_tokens(self, node: Node, count: int) -> Tensor:
        """Returns the last `count` tokens of a node's path, after M where there are fewer, on the CPU."""
        return self._neighbours.last(torch.tensor([node.start + node.length - 1]), count)[0]


class _Call:
    """Segments computed together, as rows of one width, the longest first."""

    def __init__(
        self,
        members: Sequence[int],
        all_: Sequence[Segment],
        done: dict[int, int],
        none: int,
        device: torch.device,
        *,
        goes_on: bool,
    ) -> None:
        """`done`: for each segment that was computed before and goes on, its place among the states of these; `none`
        stands for no token."""
        self.members, self.goes_on = list(members), goes_on
        self.rows = len(members)
        width = all_[members[0]].length
        step = torch.arange(width)
        own = [(all_[number].start, all_[number].length) for number in members]
        start_R, length_R = torch.tensor(own).unbind(1)
        real = step < length_R[:, None]
        self.token_R = torch.where(real, start_R[:, None] + step, none).flatten()
        self.tokens = CopiedRows(self.token_R, device, real.flatten())
        parents = [all_[number].parent for number in members]
        places = torch.tensor([done[parent] for parent in parents if parent is not None])
        self._place_R = None if None in parents else to_device(places, device)

    def before(self, states: Sequence[Tensor]) -> Tensor | None:
        """Returns the state before each row; `states` are those after the segments of earlier calls that go on."""
        if self._place_R is None:
            return None
        return (states[0] if len(states) == 1 else torch.cat([*states])).index_select(0, self._place_R)


def _ordered(all_: Sequence[Segment], none: int, device: torch.device) -> Iterator[_Call]:
    """Yields calls for segments. Each comes after the call of its parent, and as late as the segments that wait for it
    allow."""
    height = [0] * len(all_)
    for number in range(len(all_) - 1, -1, -1):
        parent = all_[number].parent
        if parent is not None:
            height[parent] = max(height[parent], height[number] + 1)
    done: dict[int, int] = {}
    for level in range(max(height), -1, -1):
        for first in (True, False):
            ready = [n for n, s in enumerate(all_) if height[n] == level and (s.parent is None) is first]
            ready.sort(key=lambda n: all_[n].length, reverse=True)
            widths = row_widths([all_[n].length for n in ready])
            for _, rows in itertools.groupby(zip(widths, ready, strict=True), key=lambda pair: pair[0]):
                members = [number for _, number in rows]
                yield _Call(members, all_, done, none, device, goes_on=level > 0)
                done |= {number: len(done) + row for row, number in enumerate(members) if level > 0}
