"""Division of a batch: its units into optimizer steps, and those of one step into forward passes."""

import heapq
from collections.abc import Sequence

import torch

from rollgrad.domain.batches.packed import PackedBatch


def minibatches(count: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """Divides `count` shuffled units into `parts` whose sizes differ by at most one; a single part is not
    shuffled."""
    if parts == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator)
    return [part.tolist() for part in order.tensor_split(parts)]


def pieces(batch: PackedBatch, largest: int) -> list[list[int]]:
    """Returns indices of the sequences that stay together in a forward pass, in the order of the batch: those of a
    unit; but if a unit has more than `largest` tokens and no loss compares its sequences, each of them alone."""
    members: dict[int, list[int]] = {}
    for sequence, unit in enumerate(batch.unit_ids_S.tolist()):
        members.setdefault(unit, []).append(sequence)
    lengths = batch.lengths_S.tolist()
    found: list[list[int]] = []
    for unit in members.values():
        divided = batch.units_divisible and sum(lengths[sequence] for sequence in unit) > largest
        found += [[sequence] for sequence in unit] if divided else [unit]
    return found


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divides units into consecutive runs of at most `max_tokens` tokens, as few as possible and of similar size.

    Order is kept, so that samples of one prompt stay neighbours. A unit longer than `max_tokens` is a run of its own.
    """
    runs = _runs(lengths, max_tokens)
    low, high = max(1, min(max_tokens, -(-sum(lengths) // max(1, len(runs))))), max_tokens
    while low < high:  # the smallest cap that needs no more runs balances them
        middle = (low + high) // 2
        if len(_runs(lengths, middle)) <= len(runs):
            high = middle
        else:
            low = middle + 1
    return _runs(lengths, low)


def _runs(lengths: Sequence[int], cap: int) -> list[list[int]]:
    runs: list[list[int]] = []
    total = 0
    for index, length in enumerate(lengths):
        if runs and total + length <= cap:
            runs[-1].append(index)
            total += length
        else:
            runs.append([index])
            total = length
    return runs


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
