"""Forward passes that a batch is divided into: planned once for all processes, and selected when they are read."""

from collections.abc import Sequence
from typing import Generic, overload

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.domain.batches.packed import Batch


class Passes(Sequence[Batch], Generic[Batch]):
    """The passes of `whole`, in order, as batches of their own.

    Args:
        whole: the batch.
        plan: the sequences of each share of each pass: `plan[number][share]`. Every sequence is in one of them.
    """

    def __init__(self, whole: Batch, plan: Sequence[Sequence[Sequence[int]]]) -> None:
        self.whole = whole
        self.plan = plan
        self.shares = len(plan[0])
        """Number of shares of each pass, one for each process, or group of processes with the same batches."""

    def sequences(self, number: int) -> list[int]:
        """Returns the sequences of a pass, in its order."""
        return [sequence for share in self.plan[number] for sequence in share]

    def merged(self, columns: Sequence[Tensor]) -> Tensor:
        """Returns one column [N] of the whole batch from those of the passes."""
        results = torch.cat([*columns])
        whole_N = torch.empty_like(results)
        whole_N[torch.cat([self.whole.token_index(self.sequences(number)) for number in range(len(self))])] = results
        return whole_N

    def __len__(self) -> int:
        return len(self.plan)

    @overload
    def __getitem__(self, number: int) -> Batch: ...
    @overload
    def __getitem__(self, number: slice) -> "list[Batch]": ...
    def __getitem__(self, number: int | slice) -> Batch | list[Batch]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        selected = self.whole.select(self.sequences(number))
        if self.shares == 1:
            return selected
        shares = [share for share, own in enumerate(self.plan[number]) for _ in own]
        return evolve(selected, shares=self.shares, shares_S=torch.tensor(shares))
