"""The recurrence of a forest whose tokens are divided over processes.

A convolution needs a few tokens before a process's own, which those that have them send. A recurrence needs all:
processes exchange tokens for heads around it, as attention does (Ulysses; Jacobs et al. 2023, arXiv:2309.14509), and
each scans the whole forest with its share of the heads. What several heads share goes once to each process that has one
of these.
Suffixes: C are this process's tokens of M; H heads; P processes; R tokens of a row.
Does not own: which tokens a process has (`sequence_parallel.py`), nor which come after which (`recurrence.py`).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.kernels.exchange import HeadExchange, all_to_all, moved
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.recurrence import Convolution, ForestRecurrence, Neighbours, Recurrence, Scan
from rollgrad.domain.errors import ConfigurationError


class SharedRecurrence(Recurrence):
    """The recurrence of a forest in one of the processes that share it; B is 1 and T is its own tokens.

    Args:
        nodes: tile the tokens of all processes.
        rank: this process's number in the group.
        tokens_P: tokens in M of each process, in ascending order.
        group: torch's.
        device: device of the model.
        key_copies: how many neighbouring heads of queries and keys are copies, which processes need not send.
    """

    stepping = False

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        rank: int,
        tokens_P: Sequence[Tensor],
        group: Any,
        device: torch.device,
        key_copies: int = 1,
    ) -> None:
        self.key_copies = key_copies
        self._rank, self._tokens_P, self._group, self._device = rank, tokens_P, group, device
        self._neighbours = Neighbours(nodes)
        self._forest = ForestRecurrence(nodes, device=device)
        place_M = torch.arange(self._neighbours.tokens)
        self._exchange = HeadExchange(
            rank=rank, heads=len(tokens_P), tokens_P=tokens_P, place_M=place_M, group=group, device=device
        )
        self._rows: dict[int, _Row] = {}

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`: one row of this process's tokens, each run of neighbours after the last
        tokens of the path before it."""
        if width not in self._rows:
            self._rows[width] = self._row(width - 1)
        row = self._rows[width]
        convolved = convolution(row.of(x[0].transpose(0, 1)).transpose(0, 1)[None])
        return row.results.of(convolved[0].transpose(0, 1)).transpose(0, 1)[None]

    def of_heads(self, x_H: Tensor) -> Tensor:
        """Implements `Recurrence.of_heads`."""
        require_heads(len(x_H), len(self._tokens_P))
        return x_H.chunk(len(self._tokens_P))[self._rank]

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Implements `Recurrence.scan`.

        Raises:
            ConfigurationError: processes do not divide the heads.
        """
        size = len(self._tokens_P)
        require_heads(columns[0].shape[2], size)
        given = [for_each(x[0], size) for x in columns]
        parts = [x_CH.reshape(len(x_CH), size, -1) for x_CH in given]
        received: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts):  # one exchange carries all of a number format
            members = [index for index, part in enumerate(parts) if part.dtype == dtype]
            exchanged = self._to_heads(torch.cat([parts[index] for index in members], dim=-1))[:, 0]
            widths = [parts[index].shape[2] for index in members]
            received |= zip(members, torch.split(exchanged, widths, dim=-1), strict=True)
        rows = [
            received[index].reshape(1, -1, x_CH.shape[1] // size, *x_CH.shape[2:]) for index, x_CH in enumerate(given)
        ]
        found = self._forest.scan(scan, rows)[0]
        own_CPW = moved(found.reshape(len(found), 1, -1), self._exchange.to_tokens, self._exchange.to_heads)
        return own_CPW.reshape(1, len(own_CPW), -1, *found.shape[2:])

    def _to_heads(self, x_CPW: Tensor) -> Tensor:
        return moved(x_CPW, self._exchange.to_heads, self._exchange.to_tokens)

    def _row(self, before: int) -> "_Row":
        """Returns the row of this process's tokens, each after the `before` ones before it."""
        none = self._neighbours.tokens
        owner_M = torch.empty(none, dtype=torch.int64)
        for rank, tokens in enumerate(self._tokens_P):
            owner_M[tokens] = rank
        # The tokens that each process needs of others, in the order of those that have them.
        needed_P = []
        for tokens in self._tokens_P:
            token_R, _ = self._neighbours.row(tokens, before)
            seen_M = torch.zeros(none + 1, dtype=torch.bool).index_fill(0, token_R, True)
            seen_M[none] = False
            needed = seen_M.index_fill(0, tokens, False).nonzero()[:, 0]
            needed_P.append(needed[owner_M[needed].argsort(stable=True)])
        own, needed = self._tokens_P[self._rank], needed_P[self._rank]
        place_M = torch.full((none + 1,), len(own) + len(needed))  # after all are zeros
        place_M[own] = torch.arange(len(own))
        sent_P = [place_M[each[owner_M[each] == self._rank]] for each in needed_P]
        place_M[needed] = len(own) + torch.arange(len(needed))
        token_R, place_C = self._neighbours.row(own, before)
        return _Row(
            sent=CopiedRows(torch.cat(sent_P), self._device),
            sent_counts=[len(each) for each in sent_P],
            received_counts=torch.bincount(owner_M[needed], minlength=len(sent_P)).tolist(),
            tokens=CopiedRows(place_M[token_R], self._device, token_R < none),
            results=CopiedRows(place_C, self._device),
            group=self._group,
        )


@frozen(eq=False)
class _Row:
    """How a process makes a row of its tokens and of those before them: which rows it sends, how many to each process,
    and how many it gets from each; which of its own rows, of those that it got, and of a zero make up the row; and
    where in it each token's result is."""

    sent: CopiedRows
    sent_counts: list[int]
    received_counts: list[int]
    tokens: CopiedRows
    results: CopiedRows
    group: Any

    def of(self, x_CW: Tensor) -> Tensor:
        """Returns the row [R, W]."""
        there = partial(self._sent, self.sent_counts, self.received_counts)
        back = partial(self._sent, self.received_counts, self.sent_counts)
        received = moved(self.sent.of(x_CW), there, back)
        return self.tokens.of(torch.cat([x_CW, received, x_CW.new_zeros(1, x_CW.shape[1])]))

    def _sent(self, counts: Sequence[int], received_counts: Sequence[int], rows: Tensor) -> Tensor:
        width = rows.shape[1]
        return all_to_all(rows.flatten(), counts, received_counts, width, group=self.group).view(-1, width)


def for_each(x_CH: Tensor, size: int) -> Tensor:
    """Returns a column [C, H, ..] whose heads `size` processes divide: where there are fewer, or others, each process
    gets a copy of those that its own share."""
    copies = math.lcm(x_CH.shape[1], size) // x_CH.shape[1]
    return x_CH if copies == 1 else x_CH.repeat_interleave(copies, dim=1)


def require_heads(heads: int, size: int) -> None:
    """Checks that `size` processes divide the heads of a recurrence.

    Raises:
        ConfigurationError: they do not.
    """
    if heads % size:
        raise ConfigurationError(
            f"ds.sequence_parallel_size is {size}, but processes divide the heads of layers that hand a state on, of "
            f"which the model has {heads}: set --ds.sequence_parallel_size to a divisor of {heads}."
        )
