"""Division of a batch: its units into optimizer steps, those of one step over processes, and those of a process into
forward passes.

Work is counted in distinct tokens: what sequences of a group begin with alike is computed once in each pass
(`prefixes.py`), so a group that is cut is partly computed twice.
"""

import heapq
import itertools
from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.prefixes import SharedPrefixes

REPEATS = 4
"""Largest sum of the lengths of a pass's sequences, as a multiple of its budget of distinct tokens. In every layer each
sequence has keys and values of its own, also of a prefix that it shares; they are a tenth of a token's memory or
less."""

PASS_SHARE = 8
"""Number of passes whose fixed costs (launches, gathering weights) are taken to be as long as a full pass of tokens."""

NEARLY_FAIR = 1.02
"""Ratio of the largest part to the least possible one at which no better division is looked for."""


@frozen
class Piece:
    """Sequences that stay together in a forward pass."""

    sequences: list[int]
    group: int
    tokens: int
    """Distinct tokens."""
    repeated: int
    """Sum of the lengths of the sequences."""
    shared: int = 0
    """How many first tokens all pieces of the group have in common."""


def minibatches(count: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """Divides `count` shuffled units into `parts` whose sizes differ by at most one; a single part is not
    shuffled."""
    if parts == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator)
    return [part.tolist() for part in order.tensor_split(parts)]


def pieces(batch: PackedBatch, largest: int, prefixes: SharedPrefixes) -> list[Piece]:
    """Returns the sequences that stay together, those of a group in a row: the units. A unit with more than `largest`
    distinct tokens is cut into runs of sequences with at most as many, if no loss compares its sequences."""
    overlaps = _Overlaps(prefixes, batch.lengths_S.tolist())
    groups: list[int] = batch.group_ids_S.tolist()
    together: dict[int, list[list[int]]] = {}  # by group
    for unit in _members(batch.unit_ids_S.tolist()):
        whole = not batch.units_divisible or overlaps.distinct(unit) <= largest
        together.setdefault(groups[unit[0]], []).extend([unit] if whole else _cut(unit, largest, overlaps))
    found: list[Piece] = []
    for group, runs in together.items():
        shared = overlaps.common([run[0] for run in runs]) if len(runs) > 1 else 0
        found += [Piece(run, group, overlaps.distinct(run), overlaps.repeated(run), shared) for run in runs]
    return found


class _Overlaps:
    """Counts the tokens of sequences of one group, and those that they begin with alike."""

    def __init__(self, prefixes: SharedPrefixes, lengths: list[int]) -> None:
        self._lengths = lengths
        self._shared = prefixes.shared
        self._places = [0] * len(lengths)  # of the sequences in the order of their tokens
        for place, sequence in enumerate(prefixes.order):
            self._places[sequence] = place

    def repeated(self, sequences: Sequence[int]) -> int:
        """Returns the sum of their lengths."""
        return sum(self._lengths[sequence] for sequence in sequences)

    def distinct(self, sequences: Sequence[int]) -> int:
        """Returns the number of their distinct tokens."""
        if len(sequences) == 1:
            return self._lengths[sequences[0]]
        places = sorted(self._places[sequence] for sequence in sequences)
        return self.repeated(sequences) - sum(itertools.starmap(self._common, itertools.pairwise(places)))

    def common(self, sequences: Sequence[int]) -> int:
        """Returns how many first tokens all of several sequences have in common."""
        places = [self._places[sequence] for sequence in sequences]
        return self._common(min(places), max(places))

    def _common(self, first: int, last: int) -> int:
        return min(self._shared[first + 1 : last + 1])


def _members(ids: Sequence[int]) -> list[list[int]]:
    """Returns the indices that have each id, by the ids' first appearance."""
    members: dict[int, list[int]] = {}
    for index, key in enumerate(ids):
        members.setdefault(key, []).append(index)
    return [*members.values()]


def _cut(unit: Sequence[int], largest: int, overlaps: _Overlaps) -> list[list[int]]:
    """Cuts a unit into runs of sequences with at most `largest` distinct tokens, or of one sequence."""
    runs = [[unit[0]]]
    for sequence in unit[1:]:
        if overlaps.distinct([*runs[-1], sequence]) <= largest:
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
    return runs


def micro_batches(pieces: Sequence[Piece], max_tokens: int, passes: int = 0) -> list[list[Piece]]:
    """Divides pieces into consecutive runs of at most `max_tokens` distinct tokens and of similar size. There are as
    few as possible, or `passes` if those are more. A longer piece is a run of its own. A group that fits in one run is
    cut only if what is then computed twice is little compared with the room that is filled."""
    groups = [_Neighbours.of(group) for group in _groups(pieces)]
    runs, work = _runs(groups, max_tokens)
    most = max(len(runs), passes)
    if most <= 1:
        return runs
    # The smallest cap at which there are no more runs, and no more work, balances them: it is found by bisection.
    low, high = max(1, min(max_tokens, -(-work // max(1, most)))), max_tokens
    while low < high:
        middle = (low + high) // 2
        found, computed = _runs(groups, middle)
        if len(found) <= most and computed <= work:
            high = middle
        else:
            low = middle + 1
    return _runs(groups, low)[0]


def distinct_tokens(run: Sequence[Piece]) -> int:
    """Returns the distinct tokens of pieces in one pass, those of a group in a row."""
    joined = sum(two.shared for one, two in itertools.pairwise(run) if one.group == two.group)
    return sum(piece.tokens for piece in run) - joined


@frozen
class _Neighbours:
    """The pieces of a group in a row, the prefix that they share, and their distinct and repeated tokens together."""

    pieces: list[Piece]
    shared: int
    tokens: int
    repeated: int

    @classmethod
    def of(cls, group: list[Piece]) -> "_Neighbours":
        """Counts a group's tokens, once for all caps that are tried."""
        return cls(group, group[0].shared, distinct_tokens(group), sum(piece.repeated for piece in group))


def _runs(groups: Sequence[_Neighbours], cap: int) -> tuple[list[list[Piece]], int]:
    """Returns runs of at most `cap` distinct tokens, and the distinct tokens of all of them."""
    runs: list[list[Piece]] = []
    tokens, repeated, work = cap, 0, 0  # tokens of the last run: at first there is none, which is as a full one
    most_repeated = REPEATS * cap
    for group in groups:
        shared = group.shared
        if tokens + group.tokens <= cap and repeated + group.repeated <= most_repeated:
            runs[-1].extend(group.pieces)
            tokens, repeated, work = tokens + group.tokens, repeated + group.repeated, work + group.tokens
            continue
        # A cut group computes its prefix twice: it begins in the room that is left only where that costs little.
        begins = shared * PASS_SHARE > cap - tokens
        for number, piece in enumerate(group.pieces):
            more = piece.tokens - (shared if number and not begins else 0)
            if runs and not begins and tokens + more <= cap and repeated + piece.repeated <= most_repeated:
                runs[-1].append(piece)
                tokens, repeated = tokens + more, repeated + piece.repeated
            else:
                runs.append([piece])
                more = piece.tokens
                tokens, repeated, begins = more, piece.repeated, False
            work += more
    return runs, work


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Returns the pieces of each group, which are neighbours."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and groups[-1][0].group == piece.group:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def divided(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """Divides pieces into `parts` lists with nearly equal numbers of distinct tokens, in their order in each. Groups
    are dealt out whole; then pieces of the largest part go to the smallest while that makes the largest smaller."""
    groups = _groups(pieces)
    if not any(len(group) > 1 and group[0].shared for group in groups):
        return [[pieces[i] for i in part] for part in balanced_partitions([p.tokens for p in pieces], parts)]
    dealt = _deal(groups, parts)
    _level(dealt, NEARLY_FAIR * least_possible(pieces, parts))
    part_of = {id(piece): n for n, part in enumerate(dealt) for group in part.groups.values() for piece in group}
    found: list[list[Piece]] = [[] for _ in range(parts)]
    for piece in pieces:
        found[part_of[id(piece)]].append(piece)
    return found


@define
class _Part:
    """A part: its distinct tokens, and the pieces that it has of each group."""

    tokens: int = 0
    groups: dict[int, list[Piece]] = field(factory=dict)

    def give(self, pieces: list[Piece], other: "_Part") -> None:
        """Gives pieces of one group to another part, without counting tokens."""
        group, given = pieces[0].group, {id(piece) for piece in pieces}
        other.groups.setdefault(group, []).extend(pieces)
        self.groups[group] = [piece for piece in self.groups[group] if id(piece) not in given]
        if not self.groups[group]:
            del self.groups[group]


def _deal(groups: Sequence[list[Piece]], parts: int) -> list[_Part]:
    """Deals out whole groups by size, the largest first, each to the part that has least (Graham 1969)."""
    dealt = [_Part() for _ in range(parts)]
    heap = [(0, number) for number in range(parts)]
    for group in sorted(groups, key=distinct_tokens, reverse=True):
        part = dealt[heap[0][1]]
        part.groups[group[0].group] = group
        part.tokens += distinct_tokens(group)
        heapq.heapreplace(heap, (part.tokens, heap[0][1]))
    return dealt


def _level(parts: Sequence[_Part], fair: float) -> None:
    """Moves pieces from the largest part to the smallest, until no part has more than `fair` tokens or no move makes
    the largest smaller."""
    while max(part.tokens for part in parts) > fair:
        largest = max(parts, key=lambda part: part.tokens)
        smallest = min(parts, key=lambda part: part.tokens)
        move = min((_best_move(group, largest, smallest) for group in largest.groups.values()), key=_Move.larger)
        if move.larger() >= largest.tokens:
            break
        largest.give(move.pieces, smallest)
        largest.tokens, smallest.tokens = move.largest, move.smallest


@frozen
class _Move:
    """A move of pieces from the largest part to the smallest, and the tokens that the two have afterwards."""

    pieces: list[Piece]
    largest: int
    smallest: int

    def larger(self) -> int:
        """Returns the tokens of the larger of the two."""
        return max(self.largest, self.smallest)


def _best_move(group: list[Piece], largest: _Part, smallest: _Part) -> _Move:
    """Returns the move of pieces of a group that comes nearest to halving the difference of the two parts."""
    shared = group[0].shared
    repeated = 0 if group[0].group in smallest.groups else shared  # what the smallest has to compute, too
    room, moved = (largest.tokens - smallest.tokens - repeated) / 2, list[Piece]()
    least = min(piece.tokens for piece in group)
    for piece in sorted(group, key=lambda piece: piece.tokens, reverse=True):
        if piece.tokens - shared <= room or (piece.tokens == least and not moved):
            moved.append(piece)
            room -= piece.tokens - shared
    tokens = sum(piece.tokens - shared for piece in moved)
    left = largest.tokens - tokens - (shared if len(moved) == len(group) else 0)
    return _Move(moved, left, smallest.tokens + tokens + repeated)


def least_possible(pieces: Sequence[Piece], parts: int) -> int:
    """Returns the least number of tokens that the largest of `parts` parts can have: a fair share of the distinct
    tokens and, where there are more parts than groups, of the shared prefixes that are then computed again."""
    groups = _groups(pieces)
    more = max(0, min(parts, len(pieces)) - len(groups))
    again = sorted(group[0].shared for group in groups for _ in group[1:])[:more]
    return -(-(sum(map(distinct_tokens, groups)) + sum(again)) // parts)


def padded_passes(batch: PackedBatch, max_tokens: int, shares: int) -> list[list[list[int]]]:
    """Returns the sequences of each share of each pass of a model that computes them side by side: of similar lengths,
    the longest first. Each share has at most `max_tokens` tokens, padding included, or one unit. Passes are
    as few as that allows, and the largest share is as small as their number allows."""
    lengths: list[int] = batch.lengths_S.tolist()
    units = _members(range(len(batch)) if batch.units_divisible else batch.unit_ids_S.tolist())
    ordered = sorted(units, key=lambda unit: max(lengths[s] for s in unit), reverse=True)

    def runs(cap: int) -> list[list[int]]:
        found: list[list[int]] = []
        width = 0
        for unit in ordered:
            if found and (len(found[-1]) + len(unit)) * width <= cap:
                found[-1].extend(unit)
            else:
                found.append([*unit])
                width = max(lengths[s] for s in unit)
        return found

    most = -(-len(runs(max_tokens)) // shares) * shares
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= most else (middle + 1, high)
    parts = runs(low)
    parts += [[] for _ in range(most - len(parts))]
    return [parts[start : start + shares] for start in range(0, most, shares)]


def balanced_partitions(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divides indices into `parts` lists whose weights (say, tokens of each process) have nearly equal sums, by the
    largest differencing method (Karmarkar and Karp 1982). Indices ascend in each; a part is empty only if there are
    fewer indices than parts.

    >>> balanced_partitions([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    # Each entry is a partial solution: (-(largest - smallest sum), order, [(sum, indices), ...] by descending sum).
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-weight, index, [(weight, [index]), *((0, []) for _ in range(parts - 1))])
        for index, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(
            ((a + b, [*left, *right]) for (a, left), (b, right) in zip(first, reversed(second), strict=True)),
            key=lambda part: -part[0],
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
        order += 1
    if not heap:
        return [[] for _ in range(parts)]
    return [sorted(indices) for _, indices in heap[0][2]]
