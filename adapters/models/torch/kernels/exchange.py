"""Rows of tensors that processes of a group send to each other, and their gradients, which go back.

Suffixes: C are this process's tokens of M, Q those of its team; G heads, each with a row of W numbers.
Does not own: which tokens a process has (`sequence_parallel.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from rollgrad.adapters.models.torch.kernels.moving import to_device


def moved(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns rows moved `there`; their gradient is moved `back`."""
    result: Tensor = _Moved.apply(rows, there, back)  # type: ignore[no-untyped-call]
    return result


def all_to_all(
    sent: Tensor, tokens: Sequence[int], received_tokens: Sequence[int], width: int, *, group: Any
) -> Tensor:
    """Sends the rows of `tokens` tokens, `width` numbers each, to each process of a group; returns what they send, end
    to end."""
    received = sent.new_empty(sum(received_tokens) * width)
    sizes, received_sizes = ([count * width for count in counts] for counts in (tokens, received_tokens))
    distributed.all_to_all_single(received, sent, received_sizes, sizes, group=group)
    return received


class HeadExchange:
    """Exchanges the tokens that a process has with all heads for more tokens with a share of the heads, and back: all
    tokens of its team, or all there are.

    Args:
        rank: this process's number in the group.
        heads: processes of a team, which are neighbours and divide heads.
        tokens_P: tokens in M of each process.
        place_M: where each token goes among those of the team, whose are the first, or among all there are.
        group: torch's.
        device: device of the rows.
    """

    def __init__(
        self, *, rank: int, heads: int, tokens_P: Sequence[Tensor], place_M: Tensor, group: Any, device: torch.device
    ) -> None:
        self._rank, self._heads, self._group = rank, heads, group
        self._counts = [len(tokens) for tokens in tokens_P]
        first = rank // heads * heads
        self._team = range(first, first + heads)
        self._team_place_Q = to_device(place_M[torch.cat([tokens_P[rank] for rank in self._team])], device)
        self._place_M = to_device(place_M[torch.cat([*tokens_P])], device)

    def to_heads(self, x_CGW: Tensor) -> Tensor:
        """Returns [Q, this process's share of G, W]."""
        mine, width = x_CGW.shape[1] // self._heads, x_CGW.shape[2]
        sent = self._by_process(x_CGW)
        received = self._all_to_all(sent, self._in_team(self._mine), self._in_team(self._counts), mine * width)
        return self._placed(received.view(-1, mine, width), self._team_place_Q)

    def to_tokens(self, x_QGW: Tensor) -> Tensor:
        """Returns [C, G, W], the inverse of `to_heads`."""
        mine, width = x_QGW.shape[1:]
        sent = x_QGW.index_select(0, self._team_place_Q).flatten()
        received = self._all_to_all(sent, self._in_team(self._counts), self._in_team(self._mine), mine * width)
        return received.view(self._heads, -1, mine, width).transpose(0, 1).flatten(1, 2)

    def all_keys(self, x_CGW: Tensor) -> Tensor:
        """Returns [M, this process's share of G, W]."""
        mine, width = x_CGW.shape[1] // self._heads, x_CGW.shape[2]
        sent = self._by_process(x_CGW).repeat(len(self._counts) // self._heads)
        received = self._all_to_all(sent, self._mine, self._counts, mine * width)
        return self._placed(received.view(-1, mine, width), self._place_M)

    def sum_of_keys(self, x_MGW: Tensor) -> Tensor:
        """Returns [C, G, W], the sum over the processes that have the same heads."""
        mine, width = x_MGW.shape[1:]
        sent = x_MGW.index_select(0, self._place_M).flatten()
        received = self._all_to_all(sent, self._counts, self._mine, mine * width)
        wide = torch.promote_types(x_MGW.dtype, torch.float32)
        parts = received.view(-1, self._heads, self._counts[self._rank], mine, width).sum(0, dtype=wide)
        return parts.to(x_MGW.dtype).transpose(0, 1).flatten(1, 2)

    def _by_process(self, x_CGW: Tensor) -> Tensor:
        """Returns the numbers for each process of the team, end to end."""
        by_process = x_CGW.reshape(len(x_CGW), self._heads, -1).transpose(0, 1).flatten()
        return by_process.contiguous()  # the gradient of a sum is one number with strides of 0

    @property
    def _mine(self) -> list[int]:
        return [self._counts[self._rank]] * len(self._counts)

    def _in_team(self, tokens: Sequence[int]) -> list[int]:
        return [count if rank in self._team else 0 for rank, count in enumerate(tokens)]

    def _placed(self, rows: Tensor, place: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy_(0, place, rows)

    def _all_to_all(self, sent: Tensor, tokens: Sequence[int], received_tokens: Sequence[int], width: int) -> Tensor:
        return all_to_all(sent, tokens, received_tokens, width, group=self._group)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None
