"""Division of a batch: its units into optimizer steps, those of one step over processes, and those of a process into
forward passes.

Work is counted in distinct tokens: what sequences of a group begin with alike is computed once in each pass
(`prefixes.py`), so a group that is cut is partly computed twice.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.prefixes import SharedPrefixes

REPEATS = 4
"""Tokens of a pass with repeats, as a multiple of its budget at most: each sequence has keys of its own for the prefix
that it shares, in every layer, and of a token's memory keys and values are a tenth or less."""

PASS_SHARE = 8
"""Passes whose fixed costs (launches, weights that are gathered) are taken for the time of a full pass of tokens."""

NEARLY_FAIR = 1.02
"""Largest part over the least possible at which no better division is looked for."""


@frozen
class Piece:
    """Sequences that stay together in a forward pass. `tokens` are distinct; the other pieces of its `group` have the
    first `shared` of them, too. `repeated` is the sum of the sequences' lengths."""

    sequences: list[int]
    group: int
    tokens: int
    repeated: int
    shared: int = 0


def minibatches(count: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """Divides `count` shuffled units into `parts` whose sizes differ by at most one; a single part is not
    shuffled."""
    if parts == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator)
    return [part.tolist() for part in order.tensor_split(parts)]


def pieces(batch: PackedBatch, largest: int, prefixes: SharedPrefixes) -> list[Piece]:
    """Returns the sequences that stay together, those of a group in a row: the units; but if a unit has more than
    `largest` distinct tokens and no loss compares its sequences, it is cut into runs of sequences that have not."""
    units: dict[int, list[int]] = {}
    for sequence, unit in enumerate(batch.unit_ids_S.tolist()):
        units.setdefault(unit, []).append(sequence)
    lengths: list[int] = batch.lengths_S.tolist()
    groups: list[int] = batch.group_ids_S.tolist()
    place = [0] * len(lengths)
    for number, sequence in enumerate(prefixes.order):
        place[sequence] = number

    def common(one: int, other: int) -> int:
        return min(prefixes.shared[place[one] + 1 : place[other] + 1])

    def distinct(sequences: list[int]) -> int:
        if len(sequences) == 1:
            return lengths[sequences[0]]
        ranked = sorted(sequences, key=place.__getitem__)
        return sum(lengths[s] for s in ranked) - sum(map(common, ranked, ranked[1:]))

    together: dict[int, list[list[int]]] = {}
    for unit in units.values():
        runs = together.setdefault(groups[unit[0]], [])
        if not batch.units_divisible or distinct(unit) <= largest:
            runs.append(unit)
            continue
        runs.append(unit[:1])
        for sequence in unit[1:]:
            if distinct([*runs[-1], sequence]) <= largest:
                runs[-1].append(sequence)
            else:
                runs.append([sequence])
    found: list[Piece] = []
    for group, runs in together.items():
        firsts = sorted((run[0] for run in runs), key=place.__getitem__)
        shared = common(firsts[0], firsts[-1]) if len(runs) > 1 else 0
        found += [Piece(run, group, distinct(run), sum(lengths[s] for s in run), shared) for run in runs]
    return found


def micro_batches(pieces: Sequence[Piece], max_tokens: int, passes: int = 0) -> list[list[Piece]]:
    """Divides pieces into consecutive runs of at most `max_tokens` distinct tokens: no more than needed, or than
    `passes`, and of similar size. A longer piece is a run of its own. A group that has room in a run of its own is cut
    only if what is then computed twice is little to the room that is filled."""
    groups = [_Neighbours.of(group) for group in _groups(pieces)]
    runs, work = _runs(groups, max_tokens)
    most = max(len(runs), passes)
    if most <= 1:
        return runs
    low, high = max(1, min(max_tokens, -(-work // max(1, most)))), max_tokens
    while low < high:  # the smallest cap that needs no more runs, nor more work, balances them
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
    tokens, repeated, work = cap, 0, 0
    most_repeated = REPEATS * cap
    for group in groups:
        shared = group.shared
        if tokens + group.tokens <= cap and repeated + group.repeated <= most_repeated:
            runs[-1].extend(group.pieces)
            tokens, repeated, work = tokens + group.tokens, repeated + group.repeated, work + group.tokens
            continue
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
    fair = NEARLY_FAIR * least_possible(pieces, parts)
    # By part and group; the groups by size, each to the part that has least (Graham 1969).
    held: list[dict[int, list[Piece]]] = [{} for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for group in sorted(groups, key=distinct_tokens, reverse=True):
        load, part = heap[0]
        held[part][group[0].group] = group
        heapq.heapreplace(heap, (load + distinct_tokens(group), part))
    loads = [load for load, _ in sorted(heap, key=lambda entry: entry[1])]
    while max(loads) > fair:
        largest, smallest = loads.index(max(loads)), loads.index(min(loads))
        moves = [_move(group, loads[largest], loads[smallest], held[smallest]) for group in held[largest].values()]
        pair, moved = min(moves, key=lambda move: max(move[0]))
        if max(pair) >= loads[largest]:
            break
        loads[largest], loads[smallest] = pair
        number = moved[0].group
        held[smallest].setdefault(number, []).extend(moved)
        gone = {id(piece) for piece in moved}
        held[largest][number] = [piece for piece in held[largest][number] if id(piece) not in gone]
        if not held[largest][number]:
            del held[largest][number]
    places = {p.sequences[0]: part for part, own in enumerate(held) for group in own.values() for p in group}
    found: list[list[Piece]] = [[] for _ in range(parts)]
    for piece in pieces:
        found[places[piece.sequences[0]]].append(piece)
    return found


def _move(
    group: list[Piece], largest: int, smallest: int, there: Mapping[int, object]
) -> tuple[tuple[int, int], list[Piece]]:
    """Returns the pieces of a group whose move from the largest part to the smallest, which has the groups `there`,
    comes nearest to halving their difference, and the tokens that the two have then."""
    shared = group[0].shared
    again = 0 if group[0].group in there else shared
    room, moved = (largest - smallest - again) / 2, list[Piece]()
    least = min(piece.tokens for piece in group)
    for piece in sorted(group, key=lambda piece: piece.tokens, reverse=True):
        if piece.tokens - shared <= room or (piece.tokens == least and not moved):
            moved.append(piece)
            room -= piece.tokens - shared
    tokens = sum(piece.tokens - shared for piece in moved)
    left = largest - tokens - (shared if len(moved) == len(group) else 0)
    return (left, smallest + tokens + again), moved


def least_possible(pieces: Sequence[Piece], parts: int) -> int:
    """Returns the least that the largest of `parts` parts can have: a fair share of the distinct tokens and, where
    there are more parts than groups, of a shared prefix more for each part more."""
    groups = _groups(pieces)
    more = max(0, min(parts, len(pieces)) - len(groups))
    again = sorted(group[0].shared for group in groups for _ in group[1:])[:more]
    return -(-(sum(map(distinct_tokens, groups)) + sum(again)) // parts)


def padded_passes(batch: PackedBatch, max_tokens: int, shares: int) -> list[list[list[int]]]:
    """Returns the sequences of each share of each pass of a model that computes them side by side: of similar lengths,
    the longest first. Each share has at most `max_tokens` tokens, padding included, or one unit; the largest is as
    small as so many passes let it be."""
    lengths: list[int] = batch.lengths_S.tolist()
    units: dict[int, list[int]] = {}
    for sequence, unit in enumerate(range(len(batch)) if batch.units_divisible else batch.unit_ids_S.tolist()):
        units.setdefault(unit, []).append(sequence)
    ordered = sorted(units.values(), key=lambda unit: max(lengths[s] for s in unit), reverse=True)

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
