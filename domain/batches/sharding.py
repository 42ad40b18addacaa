"""Division of a batch over processes that take optimizer steps together.

Invariants: every process gets a part, so that all make the same calls; tokens are balanced; each sample is in one part.
A part that would be empty holds one sample with weight 0, whose gradient is 0.
"""

from collections.abc import Sequence
from typing import Generic

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.batches.partition import balanced_partitions, pieces


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
    """Divides `batch`; samples keep their order within a part. Units stay whole, but for those with more than a fair
    share of the tokens whose sequences no loss compares."""
    together = pieces(batch, batch.token_count // parts)
    lengths = [sum(batch.lengths_S[sequences].tolist()) for sequences in together]
    divided: list[Batch] = []
    tokens: list[Tensor | None] = []
    for chosen in balanced_partitions(lengths, parts):
        if chosen:
            sequences = sorted(sequence for place in chosen for sequence in together[place])
            divided.append(batch.select(sequences))
            tokens.append(batch.token_index(sequences))
        else:
            divided.append(weightless(batch.select(together[lengths.index(min(lengths))])))
            tokens.append(None)
    return Shards(divided, tokens, batch.token_count)


def weightless(batch: Batch) -> Batch:
    """Returns the same batch with weight 0 for every token in every loss: all columns of weights are 0."""
    return evolve(batch, **{name: torch.zeros_like(c) for name, _, c in batch.columns() if "_weights_" in name})
