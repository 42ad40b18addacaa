"""Division of a batch over processes that take optimizer steps together.

Invariants: distinct tokens are balanced; each sample is in one part.
Every process makes the same calls: a part that would be empty gets the `least` of the samples with weight 0, whose
gradient is 0.
"""

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.partition import divided, pieces
from rollgrad.domain.batches.prefixes import shared_prefixes


def sequences_of_shares(batch: PackedBatch, parts: int) -> list[Tensor]:
    """Returns the indices of the sequences of each of `parts` parts, as was planned (`PackedBatch.shares`), or else by
    distinct tokens. Units stay whole, but for those with more than a fair share of the tokens whose sequences no loss
    compares."""
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
