"""Runs a per-token function over a batch within a token budget."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.partition import micro_batches


def split(batch: PackedBatch, max_tokens: int) -> list[PackedBatch]:
    """Consecutive parts of `batch`, each within `max_tokens` (a longer sequence goes alone)."""
    return [batch.select(part) for part in micro_batches(batch.lengths_S.tolist(), max_tokens)]


def per_token(batch: PackedBatch, max_tokens: int, function: Callable[[PackedBatch], Tensor]) -> Tensor:
    """`function`'s result for every token of `batch`, computed part by part."""
    return torch.cat([function(part) for part in split(batch, max_tokens)])
