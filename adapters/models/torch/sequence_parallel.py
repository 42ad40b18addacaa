"""One packed batch divided over the processes of a group, in attention by heads and by queries.

Every process computes a share of the tokens. Attention needs them all. As far as key/value heads go, tokens are
exchanged for heads around it (Ulysses; Jacobs et al. 2023, arXiv:2309.14509): a team of processes, whose number divides
that of the heads, attends with some heads each. Where there are more processes, teams divide the queries
(`queries.py`), and each process gets the keys and values of its heads from all of them, as in Llama 3's context
parallelism (Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2); in the backward pass their gradients go
back and are added. The processes' results for action tokens are gathered at the end, and every process computes the
loss of the whole batch.
Invariant: the sum of the processes' gradients is the gradient of that loss, once.
Suffixes: C are this process's tokens of M, Q those of its team; B its action tokens of A; G key/value heads, each with
its query heads in a row of W numbers.
Does not own: which tokens attend to which (`attention.py`), nor the sum over processes (the optimizer's).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, distributed

from rollgrad.adapters.models.torch.attention import PLAIN, AttentionPlan, ScoreForm
from rollgrad.adapters.models.torch.image_attention import make_plan
from rollgrad.adapters.models.torch.layout import Layout, Node
from rollgrad.adapters.models.torch.moving import to_device
from rollgrad.adapters.models.torch.padded import require_undivided
from rollgrad.adapters.models.torch.queries import Queries, all_queries, divided, queries_of, tokens_of
from rollgrad.domain.errors import ConfigurationError


@frozen(kw_only=True, eq=False)
class SequenceGroup:
    """`size` processes with the same batches, of which this is number `rank`; `group` is torch's. Neighbours make teams
    of `heads` processes, which divide key/value heads; teams divide queries. The default is a single process, whose
    share is the whole."""

    rank: int = 0
    size: int = 1
    heads: int = 1
    group: Any = None

    @property
    def teams(self) -> int:
        """Number of teams."""
        return self.size // self.heads

    def share(self, layout: Layout) -> "SequenceShare":
        """Returns this process's share of a layout, to which tokens are added if there are too few: a sequence without
        actions."""
        # Of two tokens a process each has one, however teams differ (`queries.divided`).
        missing = (self.size if self.teams == 1 else 2 * self.size) - len(layout.tokens_M)
        if self.size > 1 and missing > 0:
            layout = evolve(
                layout,
                tokens_M=torch.cat([layout.tokens_M, layout.tokens_M[:1].expand(missing)]),
                positions_M=torch.cat([layout.positions_M, torch.arange(missing)]),
                nodes=(*layout.nodes, Node(len(layout.tokens_M), missing)),
            )
        if self.teams == 1:
            queries, of_teams = all_queries(layout), [torch.arange(len(layout.tokens_M))]
        else:
            pieces = divided(layout.nodes, self.teams)
            queries = queries_of(pieces[self.rank // self.heads], len(layout.tokens_M))
            of_teams = [tokens_of(each) for each in pieces]
        # Of a team every one has each `heads`-th, so that prompt and observation tokens, which need no product with the
        # vocabulary, are spread evenly.
        tokens_P = tuple(tokens[first :: self.heads] for tokens in of_teams for first in range(self.heads))
        return SequenceShare(group=self, layout=layout, queries=queries, tokens_P=tokens_P)

    def gathered(self, actions_B: Tensor, count: int, *columns_B: Tensor) -> tuple[Tensor, ...]:
        """Returns columns_A of all `count` action tokens from those of each process.

        Every process computes the same loss; in the backward pass each takes the gradient of its own values.
        """
        if self.size == 1:
            return columns_B
        result: tuple[Tensor, ...] = _Gathered.apply(self.group, actions_B, count, *columns_B)  # type: ignore[no-untyped-call]
        return result


@frozen(kw_only=True, eq=False)
class SequenceShare:
    """One process's share of a layout: `tokens_P` are the tokens of each process of the group, `queries` those of this
    one's team."""

    group: SequenceGroup
    layout: Layout
    queries: Queries
    tokens_P: tuple[Tensor, ...]

    def of(self, column_M: Tensor) -> Tensor:
        """Returns column_C, this process's tokens."""
        if self.group.size == 1:
            return column_M
        return column_M.index_select(0, to_device(self.tokens_P[self.group.rank], column_M.device))

    def actions(self, rows_A: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions_B, the action tokens whose rows in M are in this process's share, and rows_B, their rows
        there."""
        mine_C = self.tokens_P[self.group.rank]
        place_M = torch.full((len(self.layout.tokens_M),), -1).index_copy(0, mine_C, torch.arange(len(mine_C)))
        place_A = place_M.to(rows_A.device).index_select(0, rows_A)
        actions_B = (place_A >= 0).nonzero()[:, 0]
        return actions_B, place_A.index_select(0, actions_B)

    def plan(self, model: Any) -> AttentionPlan:
        """Returns the plan of a model's pass over this process's tokens."""
        plan = make_plan(model, self.layout, self.queries)
        if self.group.size == 1:
            return plan
        return _SharedAttention(plan, self.group, _Exchange(self, next(model.parameters()).device))


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


def sequence_group(*models: Any) -> SequenceGroup:
    """Returns the group over which batches are divided that all `models` compute, a student and its teacher alike.

    Raises:
        ConfigurationError: one is computed padded, or hands a state from token to token.
    """
    for model in models:
        require_undivided(model, "ds.sequence_parallel_size", _joined.size)
    if _joined.size == 1:
        return _joined
    heads = (count for model in models for count in _key_heads(model.config.get_text_config()))
    return evolve(_joined, heads=math.gcd(_joined.size, *heads))


def _key_heads(text: Any) -> Iterator[int]:
    """Yields the number of key/value heads of each layer of a model with these settings, which may be unlike."""
    for layer in (text.per_layer_config[index] for index in range(text.num_hidden_layers)):
        if getattr(layer, "multi_query", False):
            yield 1
        elif getattr(layer, "kv_lora_rank", None) is not None:  # latent attention makes keys for every query head
            yield layer.num_attention_heads
        else:
            yield getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


class _SharedAttention(AttentionPlan):
    """A plan for a team's queries of all tokens, in a process that has a share of the tokens before and after."""

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
        """Implements `AttentionPlan.attend`; B is 1 and T is this process's share of M.

        Raises:
            ConfigurationError: its key/value heads are not those of the model's settings.
        """
        (_, heads, tokens, dim), groups = query.shape, key.shape[1]
        if groups % self._group.heads:
            raise ConfigurationError(
                f"ds.sequence_parallel_size is {self._group.size}, but layer {layer} has {groups} key/value heads, "
                "which the model's settings do not say: leave --ds.sequence_parallel_size out."
            )
        # A key head and the query heads that share it are one row.
        q, k, v = (x[0].transpose(0, 1).reshape(tokens, groups, -1) for x in (query, key, value))
        widths = [q.shape[2], k.shape[2], v.shape[2]]
        if self._group.teams == 1:  # one exchange carries all three
            q, k, v = torch.split(self._to_heads(torch.cat([q, k, v], dim=-1)), widths, dim=-1)
        else:
            q, keys = self._to_heads(q), torch.cat([k, v], dim=-1)
            gathered = self._moved(keys, self._exchange.all_keys, self._exchange.sum_of_keys)
            k, v = torch.split(gathered, widths[1:], dim=-1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q.reshape(len(q), -1, dim), k, v))
        if form.sinks_H is not None:
            first = self._group.rank % self._group.heads * q.shape[1]
            form = evolve(form, sinks_H=form.sinks_H.narrow(0, first, q.shape[1]))
        out = self._plan.attend(layer, q, k, v, scaling, window, form)[0]
        out = out.reshape(len(out), k.shape[1], -1)
        if self._group.heads > 1:
            out = self._moved(out, self._exchange.to_tokens, self._exchange.to_heads)
        return out.reshape(1, tokens, heads, -1)

    def _to_heads(self, x_CGW: Tensor) -> Tensor:
        if self._group.heads == 1:
            return x_CGW
        return self._moved(x_CGW, self._exchange.to_heads, self._exchange.to_tokens)

    @staticmethod
    def _moved(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        moved: Tensor = _Moved.apply(rows, there, back)  # type: ignore[no-untyped-call]
        return moved


class _Exchange:
    """Exchanges the tokens that a process has with all heads for more tokens with a share of the heads, and back: all
    tokens of its team, or all there are."""

    def __init__(self, share: SequenceShare, device: torch.device) -> None:
        group, heads = share.group, share.group.heads
        self._group = group
        self._counts = [len(tokens) for tokens in share.tokens_P]
        first = group.rank // heads * heads
        self._team = range(first, first + heads)
        place_M = share.queries.place_M
        self._team_place_Q = to_device(place_M[torch.cat([share.tokens_P[rank] for rank in self._team])], device)
        self._place_M = to_device(place_M[torch.cat(share.tokens_P)], device)

    def to_heads(self, x_CGW: Tensor) -> Tensor:
        """Returns [Q, this process's share of G, W]."""
        mine, width = x_CGW.shape[1] // self._group.heads, x_CGW.shape[2]
        sent = torch.cat([part.flatten() for part in torch.split(x_CGW, mine, dim=1)])
        received = self._all_to_all(sent, self._in_team(self._mine), self._in_team(self._counts), mine * width)
        return self._placed(received.view(-1, mine, width), self._team_place_Q)

    def to_tokens(self, x_QGW: Tensor) -> Tensor:
        """Returns [C, G, W], the inverse of `to_heads`."""
        mine, width = x_QGW.shape[1:]
        sent = x_QGW.index_select(0, self._team_place_Q).flatten()
        received = self._all_to_all(sent, self._in_team(self._counts), self._in_team(self._mine), mine * width)
        return received.view(self._group.heads, -1, mine, width).transpose(0, 1).flatten(1, 2)

    def all_keys(self, x_CGW: Tensor) -> Tensor:
        """Returns [M, this process's share of G, W]."""
        heads, width = self._group.heads, x_CGW.shape[2]
        mine = x_CGW.shape[1] // heads
        parts = [part.flatten() for part in torch.split(x_CGW, mine, dim=1)]
        sent = torch.cat(parts * self._group.teams)
        received = self._all_to_all(sent, self._mine, self._counts, mine * width)
        return self._placed(received.view(-1, mine, width), self._place_M)

    def sum_of_keys(self, x_MGW: Tensor) -> Tensor:
        """Returns [C, G, W], the sum over the processes that have the same heads."""
        mine, width = x_MGW.shape[1:]
        sent = x_MGW.index_select(0, self._place_M).flatten()
        received = self._all_to_all(sent, self._counts, self._mine, mine * width)
        wide = torch.promote_types(x_MGW.dtype, torch.float32)
        parts = received.view(self._group.teams, self._group.heads, -1, mine, width).sum(0, dtype=wide)
        return parts.to(x_MGW.dtype).transpose(0, 1).flatten(1, 2)

    @property
    def _mine(self) -> list[int]:
        return [self._counts[self._group.rank]] * self._group.size

    def _in_team(self, tokens: Sequence[int]) -> list[int]:
        return [count if rank in self._team else 0 for rank, count in enumerate(tokens)]

    def _placed(self, rows: Tensor, place: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy_(0, place, rows)

    def _all_to_all(self, sent: Tensor, tokens: Sequence[int], received_tokens: Sequence[int], width: int) -> Tensor:
        """Sends so many tokens of `width` numbers to each process, and returns what they send, end to end."""
        received = sent.new_empty(sum(received_tokens) * width)
        sizes, received_sizes = ([count * width for count in counts] for counts in (tokens, received_tokens))
        distributed.all_to_all_single(received, sent, received_sizes, sizes, group=self._group.group)
        return received


class _Moved(torch.autograd.Function):
    """Moves rows `there`, and their gradient `back`, by two methods of an `_Exchange`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None


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
