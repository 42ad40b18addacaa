"""How samples are divided: into optimizer steps, and within one into forward passes."""

from collections.abc import Sequence

import torch


def minibatches(count: int, size: int | None, generator: torch.Generator) -> list[list[int]]:
    """Shuffled partition of `count` samples into ceil(count / size) parts whose sizes differ by at most one; one part
    in order when `size` is None or not smaller than `count`."""
    if size is None or size >= count:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator)
    return [part.tolist() for part in order.tensor_split(-(-count // size))]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Consecutive runs of samples whose tokens sum to at most `max_tokens`, as few as possible and of like size.

    Order is kept, so that samples of one prompt stay neighbours. A sample longer than the budget is a run of its own.
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
