"""Rows of a tensor copied to places, a row to several: the keys of a prompt to each reply that sees them.

The gradient of a row is the sum of those of its places. The backward pass of `index_select` adds one place after the
other to rows of zeros: on a GPU by atomic operations, in an order that is another each time, and rounds after each.
Here each row is written once, with the sum over its places as over a bag (`torch.nn.functional.embedding_bag`): in
their order, and in float32 where they are in half precision.
Invariant: gradients are the same bits each time, on any device.
Suffixes: K places; M rows; P places in the order of their rows; S rows whose gradient is summed.
"""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.moving import to_device


class CopiedRows:
    """Copies row `row_K[k]` to place k, of tensors on `device` with any number of columns.

    Args:
        row_K: int64, on the CPU; a row may be in several places or in none.
        device: device of the tensors.
        real_K: whether a place is more than filling, whose gradient is zero and is not read; None if all are.
    """

    def __init__(self, row_K: Tensor, device: torch.device, real_K: Tensor | None = None) -> None:
        self.row_K = to_device(row_K, device)
        """The row at each place, on the device."""
        self._given = row_K, real_K
        self._bags: dict[int, _Bags] = {}

    def of(self, x_M: Tensor) -> Tensor:
        """Returns the rows at all places, [K, ..] of [M, ..]."""
        copied: Tensor = _Copied.apply(x_M, self)  # type: ignore[no-untyped-call]
        return copied

    def gradient(self, places_K: Tensor, rows: int) -> Tensor:
        """Returns the gradient [M, ..] at `rows` (M) rows from the gradient [K, ..] at places."""
        if rows not in self._bags:  # made in the first backward pass, for all layers
            self._bags[rows] = _bags(*self._given, rows, self.row_K.device)
        return self._bags[rows].sums(places_K.contiguous())


@frozen(eq=False)
class _Bags:
    """Places in the order of their rows, and where those of each row begin; `copied_M` is one place of each row, and
    `summed_S` are the rows that have another number of places than one. Without them all rows are sums."""

    place_P: Tensor
    begin_S: Tensor
    summed_S: Tensor | None = None
    copied_M: Tensor | None = None

    def sums(self, places_K: Tensor) -> Tensor:
        """Returns the sum over the places of each row, [M, ..]."""
        if self.copied_M is None or self.summed_S is None:
            return self._sums(places_K)
        rows = places_K.index_select(0, self.copied_M)
        return rows.index_copy_(0, self.summed_S, self._sums(places_K)) if len(self.summed_S) else rows

    def _sums(self, places_K: Tensor) -> Tensor:
        sums = functional.embedding_bag(self.place_P, places_K.flatten(1), self.begin_S, mode="sum")
        return sums.view(-1, *places_K.shape[1:])


def _bags(row_K: Tensor, real_K: Tensor | None, rows: int, device: torch.device) -> _Bags:
    place_P = row_K.argsort(stable=True)
    if real_K is not None:
        place_P = place_P[real_K[place_P]]
    count_M = torch.bincount(row_K[place_P], minlength=rows)
    begin_M = count_M.cumsum(0) - count_M
    summed_M = count_M != 1
    # A GPU copies 16 bytes at a time and sums two, so that most rows are copied where most have one place.
    if device.type != "cuda" or 2 * int(summed_M.sum()) > rows:
        return _Bags(to_device(place_P, device), to_device(begin_M, device))
    count_S = count_M[summed_M]
    return _Bags(
        to_device(place_P[summed_M.repeat_interleave(count_M)], device),
        to_device(count_S.cumsum(0) - count_S, device),
        to_device(summed_M.nonzero()[:, 0], device),
        to_device(place_P[begin_M.clamp(max=len(place_P) - 1)], device),
    )


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_M: Tensor, copied: CopiedRows) -> Tensor:
        ctx.copied, ctx.rows = copied, len(x_M)
        return x_M.index_select(0, copied.row_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, places_K: Tensor) -> tuple[Tensor, None]:
        return ctx.copied.gradient(places_K, ctx.rows), None
