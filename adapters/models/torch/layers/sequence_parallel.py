"""One packed batch divided over the processes of a group, in attention by heads and by queries.

Every process computes a share of the tokens. Attention needs them all. As far as key/value heads go, tokens are
exchanged for heads around it (Ulysses; Jacobs et al. 2023, arXiv:2309.14509): a team of processes, whose number divides
that of the heads, attends with some heads each. Where there are more processes, teams divide the queries
(`queries.py`), and each process gets the keys and values of its heads from all of them, as in Llama 3's context
parallelism (Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). In the backward pass the gradients of keys
and values go back and are added. The processes' results for action tokens are gathered at the end, and every process
computes the loss of the whole batch.
Invariant: the sum of the processes' gradients is the gradient of that loss, once.
Suffixes: C are this process's tokens of M, Q those of its team; B its action tokens of A; G key/value heads, each with
its query heads in a row of W numbers.
Does not own: which tokens attend to which (`attention.py`), how a state is handed on (`shared_recurrence.py`), nor the
sum over processes (the optimizer's).
"""

import math
from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, distributed

from rollgrad.adapters.models.torch.kernels.exchange import HeadExchange, moved
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention import AttentionPlan, backbone
from rollgrad.adapters.models.torch.layers.image_attention import make_plan
from rollgrad.adapters.models.torch.layers.layout import Layout, Node
from rollgrad.adapters.models.torch.layers.padded import require_packed
from rollgrad.adapters.models.torch.layers.queries import Queries, all_queries, divided, queries_of, tokens_of
from rollgrad.adapters.models.torch.layers.recurrent_layers import attending_layers, key_copies, recurrent_types
from rollgrad.adapters.models.torch.layers.shared_recurrence import SharedRecurrence, require_heads
from rollgrad.domain.errors import ConfigurationError

RUN = 64
"""Neighbouring tokens that a process has at most where layers hand a state on: a convolution needs a few before each
run, mostly of another process."""

TURNS = 8
"""Runs of tokens that each process of a team has at least, if there are as many tokens."""


@frozen(kw_only=True, eq=False)
class SequenceGroup:
    """Processes with the same batches, which share each sequence. The default is a single process, whose share is the
    whole."""

    rank: int = 0
    """Number of this process."""
    size: int = 1
    """Number of processes."""
    heads: int = 1
    """Processes of a team: neighbours, which divide key/value heads. Teams divide queries."""
    run: int = 1
    """Largest number of neighbouring tokens that a process has at a time."""
    group: Any = None
    """The processes' group in torch."""

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
        tokens_P = tuple(mine for tokens in of_teams for mine in self._dealt(tokens))
        return SequenceShare(group=self, layout=layout, queries=queries, tokens_P=tokens_P)

    def _dealt(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yields the tokens of each process of a team, which take turns, so that prompt and observation tokens, which
        need no product with the vocabulary, are spread evenly."""
        run = max(1, min(self.run, len(tokens) // (TURNS * self.heads)))
        turn = torch.arange(len(tokens)) // run % self.heads
        return (tokens[turn == number] for number in range(self.heads))

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
        return plan if self.group.size == 1 else _SharedAttention(plan, self, model)


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
        ConfigurationError: one is computed padded, or hands states on in heads whose number processes do not divide.
    """
    if _joined.size == 1:
        return _joined
    for model in models:
        require_packed(model, "ds.sequence_parallel_size", _joined.size)
        require_heads(getattr(backbone(model), "state_heads", 0), _joined.size)
    heads = (count for model in models for count in _key_heads(model.config.get_text_config()))
    run = RUN if any(map(recurrent_types, models)) else 1
    return evolve(_joined, heads=math.gcd(_joined.size, *heads), run=run)


def _key_heads(text: Any) -> Iterator[int]:
    """Yields the number of key/value heads of each layer that has any, of a model with these settings, which may be
    unlike."""
    for layer in (text.per_layer_config[index] for index in attending_layers(text)):
        if getattr(layer, "multi_query", False):
            yield 1
        elif getattr(layer, "kv_lora_rank", None) is not None:  # latent attention makes keys for every query head
            yield layer.num_attention_heads
        else:
            yield getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


class _SharedAttention(AttentionPlan):
    """A plan for a team's queries of all tokens, in a process that has a share of the tokens before and after."""

    compiles = True

    def __init__(self, plan: AttentionPlan, share: SequenceShare, model: Any) -> None:
        self._plan, self._share, self._model = plan, share, model
        self._group = group = share.group
        self._exchange = HeadExchange(
            rank=group.rank,
            heads=group.heads,
            tokens_P=share.tokens_P,
            place_M=share.queries.place_M,
            group=group.group,
            device=next(model.parameters()).device,
        )

    @cached_property
    def recurrence(self) -> SharedRecurrence:
        """Which tokens those of this process come after, in layers that hand a state on."""
        return SharedRecurrence(
            self._share.layout.nodes,
            rank=self._group.rank,
            tokens_P=self._share.tokens_P,
            group=self._group.group,
            device=next(self._model.parameters()).device,
            key_copies=key_copies(self._model.config.get_text_config()),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
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
            gathered = moved(keys, self._exchange.all_keys, self._exchange.sum_of_keys)
            k, v = torch.split(gathered, widths[1:], dim=-1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q.reshape(len(q), -1, dim), k, v))
        if form.sinks_H is not None:
            first = self._group.rank % self._group.heads * q.shape[1]
            form = evolve(form, sinks_H=form.sinks_H.narrow(0, first, q.shape[1]))
        out = self._plan.attend(layer, q, k, v, form)[0]
        out = out.reshape(len(out), k.shape[1], -1)
        if self._group.heads > 1:
            out = moved(out, self._exchange.to_tokens, self._exchange.to_heads)
        return out.reshape(1, tokens, heads, -1)

    def _to_heads(self, x_CGW: Tensor) -> Tensor:
        if self._group.heads == 1:
            return x_CGW
        return moved(x_CGW, self._exchange.to_heads, self._exchange.to_tokens)


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
