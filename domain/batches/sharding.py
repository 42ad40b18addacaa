"""Division of a batch over processes that take optimizer steps together.

Invariants: every process gets a part, so that all make the same calls; tokens are balanced; each sample is in one part.
A part that would be empty holds one sample with weight 0, whose gradient is 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.partition import balanced_partitions

_WEIGHTS = ("loss_weights_N", "value_weights_N", "positive_weights_N")


@frozen(eq=False)
class Shards:
    """`parts`: a batch for each process. `tokens`: index in the whole batch of each token of a part, None for a part of
    weight 0. `total`: tokens of the whole batch."""

    parts: list[PackedBatch]
    tokens: list[Tensor | None]
    total: int

    def merged(self, columns: Sequence[Tensor]) -> Tensor:
        """Returns one column [N] of the whole batch from those of the parts."""
        whole_N = torch.zeros(self.total, dtype=columns[0].dtype)
        for index, column in zip(self.tokens, columns, strict=True):
            if index is not None:
                whole_N[index] = column.cpu()
        return whole_N


def shards(batch: PackedBatch, parts: int) -> Shards:
    """Divides `batch`; samples keep their order within a part."""
    lengths = batch.lengths_S.tolist()
    divided: list[PackedBatch] = []
    tokens: list[Tensor | None] = []
    for indices in balanced_partitions(lengths, parts):
        divided.append(batch.select(indices) if indices else weightless(batch.select([lengths.index(min(lengths))])))
        tokens.append(batch.token_index(indices) if indices else None)
    return Shards(divided, tokens, batch.token_count)


def weightless(batch: PackedBatch) -> PackedBatch:
    """Returns the same batch with weight 0 for every token in every loss."""
    columns = ((name, getattr(batch, name)) for name in _WEIGHTS)
    zeros: dict[str, Any] = {name: torch.zeros_like(column) for name, column in columns if column is not None}
    return evolve(batch, **zeros)
