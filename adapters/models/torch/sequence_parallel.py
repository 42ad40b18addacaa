"""One packed batch divided over the processes of a group (Ulysses; Jacobs et al. 2023, arXiv:2309.14509).

Every process computes a share of the tokens. Attention needs them all, so around it tokens are exchanged for heads:
each process attends over the whole batch with whole key/value groups of its own. Where there are more processes than
key/value heads, these are repeated, each copy with a part of the query heads. The processes' results for action tokens
are gathered at the end, and every process computes the loss of the whole batch.
Invariant: the sum of the processes' gradients is the gradient of that loss, once.
Suffixes: C are this process's tokens of M, B its action tokens of A; G key/value heads, each with its query heads in a
row of W numbers.
Does not own: which tokens attend to which (`attention.py`), nor the sum over processes (the optimizer's).
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, distributed

from rollgrad.adapters.models.torch.attention import PLAIN, AttentionPlan, ScoreForm
from rollgrad.adapters.models.torch.layout import Layout, Node
from rollgrad.adapters.models.torch.padded import is_padded, require_undivided
from rollgrad.domain.errors import ConfigurationError


@frozen(kw_only=True, eq=False)
class SequenceGroup:
    """`size` processes with the same batches, of which this is number `rank`; `group` is torch's. The default is a
    single process, whose share is the whole."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def padded(self, layout: Layout) -> Layout:
        """Returns a layout with a multiple of `size` tokens: the added ones are a sequence without actions."""
        missing = self.size - len(layout.tokens_M)
        if missing <= 0:
            return layout
        return evolve(
            layout,
            tokens_M=torch.cat([layout.tokens_M, layout.tokens_M[:1].expand(missing)]),
            positions_M=torch.cat([layout.positions_M, torch.arange(missing)]),
            nodes=(*layout.nodes, Node(len(layout.tokens_M), missing)),
        )

    def share(self, column_M: Tensor) -> Tensor:
        """Returns column_C, this process's tokens: every `size`-th one, so that prompt and observation tokens, which
        need no product with the vocabulary, are spread evenly."""
        return column_M[self.rank :: self.size]

    def actions(self, rows_A: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions_B, the action tokens whose rows in M are in this process's share, and rows_B, their rows
        there."""
        actions_B = (rows_A % self.size == self.rank).nonzero()[:, 0]
        return actions_B, rows_A[actions_B] // self.size

    def copies(self, key_heads: int, query_heads: int) -> int:
        """Returns how often each key/value head is there, so that every process has one: the least number that divides
        the query heads which share it.

        Raises:
            ConfigurationError: there are too few query heads.
        """
        if query_heads < self.size:
            raise ConfigurationError(
                f"ds.sequence_parallel_size is {self.size}, but the model has {query_heads} query heads, and every "
                f"process needs one: set --ds.sequence_parallel_size to {query_heads} at most."
            )
        shared = query_heads // key_heads
        return next(
            copies for copies in range(1, shared + 1) if shared % copies == 0 and copies * key_heads >= self.size
        )

    def heads(self, count: int) -> list[int]:
        """Returns the number of key/value heads of each process, out of `count`, with copies."""
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def plan(self, plan: AttentionPlan, tokens: int, device: torch.device) -> AttentionPlan:
        """Returns a plan for shares of the `tokens` that attends as `plan` does for all of them."""
        return plan if self.size == 1 else _ExchangedAttention(plan, self, _Exchange(self, tokens, device))

    def gathered(self, actions_B: Tensor, count: int, *columns_B: Tensor) -> tuple[Tensor, ...]:
        """Returns columns_A of all `count` action tokens from those of each process.

        Every process computes the same loss; in the backward pass each takes the gradient of its own values.
        """
        if self.size == 1:
            return columns_B
        result: tuple[Tensor, ...] = _Gathered.apply(self.group, actions_B, count, *columns_B)  # type: ignore[no-untyped-call]
        return result


_joined = SequenceGroup()


def join_sequence_group(size: int, *, timeout: float) -> None:
    """Makes groups of `size` neighbouring ranks; models made in this process from now on are divided over its group.

    All processes of torch's default group call it; `size` divides their number. No exchange waits more than `timeout`
    seconds for the others.
    """
    global _joined
    _joined = SequenceGroup()
    if size == 1:
        return
    rank = distributed.get_rank()
    for first in range(0, distributed.get_world_size(), size):  # torch has every process make every group
        ranks = list(range(first, first + size))
        group = distributed.new_group(ranks, timeout=timedelta(seconds=timeout))
        if rank in ranks:
            _joined = SequenceGroup(rank=rank - first, size=size, group=group)


def sequence_group(model: Any) -> SequenceGroup:
    """Returns the group over which the batches of `model` are divided.

    Raises:
        ConfigurationError: the model has too few query heads for it, or is computed padded.
    """
    if is_padded(model):
        require_undivided(model, "ds.sequence_parallel_size", _joined.size)
        return _joined
    _joined.copies(1, model.config.get_text_config().num_attention_heads)  # key/value heads may differ between layers
    return _joined


class _ExchangedAttention(AttentionPlan):
    """A plan for all tokens, in a process that has a share of them before and after."""

    compiles = True

    def __init__(self, plan: AttentionPlan, group: SequenceGroup, exchange: "_Exchange") -> None:
        self._plan = plan
        self._group = group
        self._exchange = exchange

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        form: ScoreForm = PLAIN,
    ) -> Tensor:
        """Implements `AttentionPlan.attend`; B is 1 and T is this process's share of M."""
        tokens, heads, dim = query.shape[2], query.shape[1], key.shape[3]
        copies = self._group.copies(key.shape[1], heads)
        if copies > 1:  # whose gradients are added in the backward pass
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        groups = key.shape[1]
        # A key head and the query heads that share it are one row, so that one exchange carries all three.
        q, k, v = (x[0].transpose(0, 1).reshape(tokens, groups, -1) for x in (query, key, value))
        rows_MGW = _ToHeads.apply(torch.cat([q, k, v], dim=-1), self._exchange)  # type: ignore[no-untyped-call]
        q, k, v = rows_MGW.split([q.shape[-1], dim, v.shape[-1]], dim=-1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q.reshape(len(q), -1, dim), k, v))
        if form.sinks_H is not None:
            first = sum(self._group.heads(groups)[: self._group.rank]) * (heads // groups)
            form = evolve(form, sinks_H=form.sinks_H.narrow(0, first, q.shape[1]))
        out = self._plan.attend(layer, q, k, v, scaling, window, form)[0]
        out = _ToTokens.apply(out.reshape(len(out), k.shape[1], -1), self._exchange, groups)  # type: ignore[no-untyped-call]
        shared: Tensor = out.reshape(1, tokens, heads, -1)
        return shared


class _Exchange:
    """Exchanges shares of `tokens` tokens with all heads for all tokens with a share of the heads, and back."""

    def __init__(self, group: SequenceGroup, tokens: int, device: torch.device) -> None:
        self._group = group
        dealt = [torch.arange(rank, tokens, group.size) for rank in range(group.size)]
        self._counts = [len(share) for share in dealt]
        self._token_M = torch.cat(dealt).to(device)
        self._place_M = torch.argsort(self._token_M)

    def to_heads(self, x_CGW: Tensor) -> Tensor:
        """Returns [M, this process's share of G, W]."""
        heads = self._group.heads(x_CGW.shape[1])
        tokens, mine, width = len(x_CGW), heads[self._group.rank], x_CGW.shape[2]
        received = self._all_to_all(
            torch.cat([part.flatten() for part in torch.split(x_CGW, heads, dim=1)]),
            [tokens * count * width for count in heads],
            [count * mine * width for count in self._counts],
        )
        return received.view(-1, mine, width).index_select(0, self._place_M)

    def to_tokens(self, x_MGW: Tensor, groups: int) -> Tensor:
        """Returns [C, `groups`, W], the inverse of `to_heads`."""
        heads = self._group.heads(groups)
        tokens, (mine, width) = self._counts[self._group.rank], x_MGW.shape[1:]
        sizes = [tokens * count * width for count in heads]
        received = self._all_to_all(
            x_MGW.index_select(0, self._token_M).flatten(), [count * mine * width for count in self._counts], sizes
        )
        parts = zip(torch.split(received, sizes), heads, strict=True)
        return torch.cat([part.view(tokens, count, width) for part, count in parts], dim=1)

    def _all_to_all(self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        received = sent.new_empty(sum(received_sizes))
        distributed.all_to_all_single(received, sent, list(received_sizes), list(sizes), group=self._group.group)
        return received


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_CGW: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.groups = exchange, x_CGW.shape[1]
        return exchange.to_heads(x_CGW)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.exchange.to_tokens(gradient, ctx.groups), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MGW: Tensor, exchange: _Exchange, groups: int) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(x_MGW, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.exchange.to_heads(gradient), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, actions_B: Tensor, count: int, *columns_B: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(actions_B)
        ctx.set_materialize_grads(False)  # a column without a gradient then costs nothing
        full_KA = torch.stack([column.new_zeros(count).index_copy(0, actions_B, column) for column in columns_B])
        distributed.all_reduce(full_KA, group=group)  # each value is nonzero in one process only
        return full_KA.unbind()

    @staticmethod
    def backward(ctx: Any, *gradients_A: Tensor | None) -> Any:
        (actions_B,) = ctx.saved_tensors
        return None, None, None, *(None if g is None else g.index_select(0, actions_B) for g in gradients_A)
