"""Linear attention, state spaces and convolutions over a forest of nodes (`layout.py`), each token after its path.

A convolution takes a token's predecessors from wherever they lie, in one row for all nodes. A recurrence hands a state
from token to token: nodes are cut into *segments* where others branch off, and each segment begins with the state at
the end of the one before it. Segments that wait for no other are computed together, as rows filled up on the right with
zeros, which leave the state as it is; all that nothing waits for come last, so replies to one prompt are rows of one
call, wherever they part.
Does not own: what a row computes (`recurrent_layers.py`).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.layout import Node
from rollgrad.adapters.models.torch.moving import to_device
from rollgrad.adapters.models.torch.row_widths import row_widths

Convolution = Callable[[Tensor], Tensor]
"""Causal convolution of rows [R, C, T], of the same shape."""

Scan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""Computes rows: takes columns [R, T, ..] and the state [R, ..] before each (None is one of zeros), and returns results
[R, T, ..] and the state after each."""


class Recurrence(Protocol):
    """Decides, for one forward pass, what each token comes after."""

    stepping: bool
    """Whether it is a step of decoding: each row has one token, and there are no gradients."""

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Returns the convolution of x [B, C, T]; a token sees itself and `width` - 1 before it."""
        ...

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Returns the results [B, T, ..] of a recurrence over columns [B, T, ..], whose zeros leave its state as it
        is."""
        ...


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


class ForestRecurrence:
    """The recurrence of a forest; B is 1 and T is the M of the layout."""

    stepping = False

    def __init__(self, nodes: Sequence[Node], *, device: torch.device) -> None:
        self._nodes, self.device = nodes, device
        self._tokens = sum(node.length for node in nodes)
        self._rows: dict[int, tuple[CopiedRows, CopiedRows]] = {}
        self.calls = 0
        """How often layers called it."""

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
        """Returns what makes a row of tokens, the last `before` of its prefix in front of each node (M stands for no
        token), and what takes each token's result from that row."""
        if before not in self._rows:
            tokens, places, end = [], [], 0
            for node in self._nodes:
                tokens += [_last(node, before, self._tokens), torch.arange(node.start, node.start + node.length)]
                places.append(torch.arange(end + before, end + before + node.length))
                end += before + node.length
            place_M = torch.empty(self._tokens, dtype=torch.int64)
            place_M[torch.cat(tokens[1::2])] = torch.cat(places)
            token_E = torch.cat(tokens)
            copied = CopiedRows(token_E, self.device, token_E < self._tokens)
            self._rows[before] = copied, CopiedRows(place_M, self.device)
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
        own = torch.arange(node.start, node.start + node.length)
        return torch.cat([_last(node, count, self._tokens), own])[node.length :]


def _last(node: Node, count: int, none: int) -> Tensor:
    """Returns the last `count` tokens of a node's prefix, after `none` where there are fewer."""
    tokens: list[int] = []
    for start, length in reversed(node.prefix):
        if len(tokens) == count:
            break
        tokens = [*range(start + max(0, length - (count - len(tokens))), start + length), *tokens]
    return torch.tensor([none] * (count - len(tokens)) + tokens, dtype=torch.int64)


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
    """Yields calls for segments, each after that of its parent, and as late as those that wait for it let it be."""
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
