"""Runs a per-token function over a batch within a token budget."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.partition import balanced_partitions, micro_batches, pieces


def split(batch: Batch, max_tokens: int, shares: int = 1) -> list[Batch]:
    """Returns consecutive parts of `batch`, each within `max_tokens`: a longer unit goes alone, or sequence by sequence
    where no loss compares them. Each of the `shares` that a part is divided into, one for each process or group of
    them, is within its share of `max_tokens`, or as long as the longest unit."""
    return [batch.select(index) for index in _indices(batch, max_tokens, shares)]


def per_token(batch: Batch, max_tokens: int, function: Callable[[Batch], Tensor]) -> Tensor:
    """Returns `function`'s result for every token of `batch`, computed part by part."""
    indices = _indices(batch, max_tokens)
    results = torch.cat([function(batch.select(index)) for index in indices])
    whole_N = torch.empty_like(results)
    whole_N[torch.cat([batch.token_index(index) for index in indices])] = results
    return whole_N


def _indices(batch: PackedBatch, max_tokens: int, shares: int = 1) -> list[list[int]]:
    together = pieces(batch, max_tokens // shares)
    lengths = [sum(batch.lengths_S[sequences].tolist()) for sequences in together]
    runs = micro_batches(lengths, max_tokens)
    if shares > 1:
        runs = [part for run in runs for part in _within_shares(run, lengths, max_tokens // shares, shares)]
    return [[sequence for place in run for sequence in together[place]] for run in runs]


def _within_shares(run: list[int], lengths: Sequence[int], budget: int, shares: int) -> list[list[int]]:
    """Returns a run of units, cut in halves until no share of a part has more tokens than `budget`, or than the longest
    unit."""
    own = [lengths[unit] for unit in run]
    largest = max(sum(own[place] for place in share) for share in balanced_partitions(own, shares))
    if largest <= max(budget, *own):
        return [run]
    half = len(run) // 2
    return [part for side in (run[:half], run[half:]) for part in _within_shares(side, lengths, budget, shares)]
