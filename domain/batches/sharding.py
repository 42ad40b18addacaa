"""Division of a batch over processes that take optimizer steps together.

Invariants: every process gets a part, so that all make the same calls; distinct tokens are balanced; each sample is in
one part.
A part that would be empty holds one sample with weight 0, whose gradient is 0.
"""

from collections.abc import Sequence
from typing import Any, Generic

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.partition import divided, pieces
from rollgrad.domain.batches.prefixes import shared_prefixes


@frozen(eq=False)
class Shards(Generic[Batch]):
    """`parts`: a batch for each process. `tokens`: index in the whole batch of each token of a part, None for a part of
    weight 0. `total`: tokens of the whole batch."""

    parts: list[Batch]
    tokens: list[Tensor | None]
    total: int

    def merged(self, columns: Sequence[Tensor]) -> Tensor:
        """Returns one column [N] of the whole batch from those of the parts."""
        whole_N = torch.zeros(self.total, dtype=columns[0].dtype)
        for index, column in zip(self.tokens, columns, strict=True):
            if index is not None:
                whole_N[index] = column.cpu()
        return whole_N


def shards(batch: Batch, parts: int) -> Shards[Batch]:
    """Divides `batch`, as it was planned for so many parts (`PackedBatch.shares`) or else by distinct tokens. Units
    stay whole, but for those with more than a fair share of the tokens whose sequences no loss compares."""
    sharing: list[Batch] = []
    tokens: list[Tensor | None] = []
    for sequences in sequences_of_shares(batch, parts):
        if len(sequences):
            sharing.append(batch.select(sequences))
            tokens.append(batch.token_index(sequences))
        else:
            sharing.append(weightless(batch.select(least(batch))))
            tokens.append(None)
    return Shards(sharing, tokens, batch.token_count)


def sequences_of_shares(batch: PackedBatch, parts: int) -> list[Tensor]:
    """Returns the indices of the sequences of each part."""
    if batch.shares_S is not None and batch.shares == parts:
        return [(batch.shares_S == part).nonzero()[:, 0] for part in range(parts)]
    prefixes = shared_prefixes(batch)
    found = divided(pieces(batch, prefixes.distinct(batch.lengths_S.tolist()) // parts, prefixes), parts)
    return [torch.tensor([s for piece in part for s in piece.sequences], dtype=torch.int64) for part in found]


def least(batch: PackedBatch) -> Tensor:
    """Returns the index of the shortest sequence, one with images if there is any, and those of its whole unit where a
    loss compares them."""
    lengths_S = batch.lengths_S
    if batch.images_S:
        without_S = torch.tensor([not images for images in batch.images_S])
        lengths_S = lengths_S + without_S * lengths_S.max()
    shortest = lengths_S.argmin()
    return shortest[None] if batch.units_divisible else batch.sequences_of([int(batch.units_S[shortest])])


def weightless(batch: Batch, chosen_S: Tensor | None = None) -> Batch:
    """Returns the same batch with weight 0 in every loss for all sequences, or for those that are `chosen_S`: all
    columns of weights are 0 there."""
    chosen_S = torch.ones(len(batch), dtype=torch.bool) if chosen_S is None else chosen_S
    chosen = {"S": chosen_S, "N": chosen_S.repeat_interleave(batch.lengths_S)}
    weights = {name: column for name, _, column in batch.columns() if "_weights_" in name}
    zeros: dict[str, Any] = {name: column.masked_fill(chosen[name[-1]], 0) for name, column in weights.items()}
    return evolve(batch, **zeros)
