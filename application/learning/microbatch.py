"""Runs a per-token function over a batch within a token budget."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.partition import micro_batches, pieces


def split(batch: Batch, max_tokens: int) -> list[Batch]:
    """Returns consecutive parts of `batch`, each within `max_tokens`: a longer unit goes alone, or sequence by sequence
    where no loss compares them."""
    return [batch.select(index) for index in _indices(batch, max_tokens)]


def per_token(batch: Batch, max_tokens: int, function: Callable[[Batch], Tensor]) -> Tensor:
    """Returns `function`'s result for every token of `batch`, computed part by part."""
    indices = _indices(batch, max_tokens)
    results = torch.cat([function(batch.select(index)) for index in indices])
    whole_N = torch.empty_like(results)
    whole_N[torch.cat([batch.token_index(index) for index in indices])] = results
    return whole_N


def _indices(batch: PackedBatch, max_tokens: int) -> list[list[int]]:
    together = pieces(batch, max_tokens)
    lengths = [sum(batch.lengths_S[sequences].tolist()) for sequences in together]
    runs = micro_batches(lengths, max_tokens)
    return [[sequence for place in run for sequence in together[place]] for run in runs]
