"""A batch divided over processes as the trainer's are, but here."""

from collections.abc import Sequence
from typing import Generic

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.batches.sharding import least, sequences_of_shares, weightless


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
    """Divides `batch`; a process without samples gets one with weight 0."""
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
