"""Experts of a mixture that processes divide (Lepikhin et al. 2020, "GShard", arXiv:2006.16668, section 3.2).

Each of a group of neighbouring processes holds as many whole experts of each layer, computes its own tokens up to the
layer's experts, and sends them to the processes that hold the experts which the router chose. Their results come back,
and are weighted where the token is. Processes of different groups that hold the same experts divide these by rows, as
they divide other parameters.

Invariant: the sum of the processes' gradients is that of the sum of their losses, wherever tokens were sent.

Suffixes: T are this process's tokens, each sent to K experts; S all T x K of them, in the order of their experts; R the
rows that this process's experts get; E all experts.

Does not own: routers, nor how rows of parameters are divided (`weight_shards.py`, `adapters/models/fsdp`).
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, distributed, nn

from rollgrad.domain.errors import ConfigurationError


@frozen(kw_only=True, eq=False)
class ExpertGroups:
    """Groups of processes that divide the experts: `mesh` is torch's, [processes of a group, groups], so that its rows
    have the processes that hold the same experts; `required`: a model without experts is refused."""

    mesh: Any
    required: bool

    @property
    def size(self) -> int:
        """Number of the processes of a group."""
        return int(self.mesh.size(0))

    @property
    def own(self) -> Any:
        """This process's group."""
        return self.mesh.get_group("experts")

    @property
    def alike(self) -> Any:
        """The mesh of the processes that hold the same experts as this one."""
        return self.mesh["rows"]


_joined: ExpertGroups | None = None


def join_expert_groups(size: int, *, timeout: float, required: bool = True) -> None:
    """Makes groups of `size` neighbouring ranks; the experts of models made in this process from now on are divided
    over its group, and 1 leaves them to each process.

    All processes of torch's default group call it; `size` divides their number. No exchange waits more than `timeout`
    seconds for the others. `required`: models made from now on must have experts.
    """
    global _joined
    _joined = None
    if size == 1:
        return
    from torch.distributed.device_mesh import DeviceMesh  # an import that takes half a second

    ranks = torch.arange(distributed.get_world_size()).view(-1, size).T.contiguous()
    of_experts, of_rows = (
        distributed.new_subgroups_by_enumeration(groups.tolist(), timeout=timedelta(seconds=timeout))[0]  # type: ignore[no-untyped-call]
        for groups in (ranks.T, ranks)
    )
    # It warns of the two gatherings that put the parts of a stack together, one in each dimension of the mesh.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = DeviceMesh.from_group([of_experts, of_rows], device, ranks, mesh_dim_names=("experts", "rows"))
    _joined = ExpertGroups(mesh=mesh, required=required)


def expert_groups() -> ExpertGroups | None:
    """Returns the groups over which experts are divided; None where they are not."""
    return _joined


def divided_stacks(model: nn.Module) -> list[Any]:
    """Returns the stacks of experts of `model` that processes divide, one of each layer that has experts.

    Raises:
        ConfigurationError: as `expert_stacks`.
    """
    return [] if _joined is None else expert_stacks(model, _joined.size, required=_joined.required)


def expert_stacks(model: nn.Module, size: int, *, required: bool = True) -> list[Any]:
    """Returns the modules of `model` that have all experts of a layer, for groups of `size` processes: those of
    transformers' interface of experts, which get tokens, the experts of each and their weights.

    Raises:
        ConfigurationError: it has none, and they are `required`; they cannot be divided; or not by `size`.
    """
    given = f"cluster.expert_parallel_size is {size}, but {type(model).__name__}"
    stacks: list[Any] = [part for part in model.modules() if hasattr(type(part), "_apply_gate")]
    named = [part for name, part in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if not set(named) <= set(stacks) or any(
        len(p) != stack.num_experts for stack in stacks for p in stack.parameters()
    ):
        raise ConfigurationError(
            f"{given} computes experts in another way than by transformers' interface of experts: leave "
            "--cluster.expert_parallel_size out."
        )
    if required and not stacks:
        raise ConfigurationError(f"{given} has no experts: leave --cluster.expert_parallel_size out.")
    for stack in stacks:
        if stack.num_experts % size:
            raise ConfigurationError(
                f"cluster.expert_parallel_size is {size}, which does not divide the {stack.num_experts} experts in a "
                f"layer of {type(model).__name__}: set --cluster.expert_parallel_size to a number that does."
            )
    return stacks


def exchange_tokens(stack: Any) -> None:
    """Has a stack of experts compute tokens of all processes of this one's group from now on, by parameters of this
    process's experts alone, which it gets next."""
    assert _joined is not None
    stack.forward = _Exchanging(stack.forward, stack.num_experts, _joined.own)
    stack.num_experts //= _joined.size


class _Exchanging:
    """The forward pass of a stack of `experts`, of which `forward` computes this process's."""

    def __init__(self, forward: Any, experts: int, group: Any) -> None:
        self._forward = forward
        self._experts = experts
        self._group = group

    def __call__(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the weighted sum of what the chosen experts make of each token."""
        exchange = _Exchange(chosen_TK, self._experts, self._group)
        rows_RH: Tensor = _ToExperts.apply(hidden_TH, exchange)  # type: ignore[no-untyped-call]
        if len(rows_RH):  # without rows nothing is computed, but the others wait for the exchange
            ones_R1 = rows_RH.new_ones(len(rows_RH), 1)
            rows_RH = self._forward(rows_RH, exchange.experts_R[:, None], ones_R1)
        found_TKH: Tensor = _ToTokens.apply(rows_RH, exchange)  # type: ignore[no-untyped-call]
        return (found_TKH * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)


class _Exchange:
    """Sends tokens, each to the processes of its `per_token` chosen experts out of `experts`, and what these make of
    them back. `experts_R` are the numbers, among this process's experts, of those that its rows are for."""

    def __init__(self, chosen_TK: Tensor, experts: int, group: Any) -> None:
        self._group, self.per_token = group, chosen_TK.shape[1]
        self._order_S = chosen_TK.flatten().argsort(stable=True)
        self._place_S = self._order_S.argsort()
        sent_E = torch.bincount(chosen_TK.flatten(), minlength=experts)
        received_E = torch.empty_like(sent_E)  # of each process in turn, the rows for each expert of this one
        distributed.all_to_all_single(received_E, sent_E, group=group)
        counts = torch.stack([sent_E, received_E]).view(2, group.size(), -1)
        self._sent, self._received = counts.sum(-1).tolist()  # waits for a GPU once
        own = torch.arange(counts.shape[-1], device=sent_E.device).repeat(group.size())
        self.experts_R = own.repeat_interleave(received_E)

    def to_experts(self, rows_TKH: Tensor) -> Tensor:
        """Returns rows_RH, the rows that all processes send to the experts of this one."""
        rows_SH = rows_TKH.flatten(0, 1).index_select(0, self._order_S)
        return self._all_to_all(rows_SH, self._sent, self._received)

    def to_tokens(self, rows_RH: Tensor) -> Tensor:
        """Returns rows_TKH, the rows that come back to this process's tokens: the inverse of `to_experts`."""
        rows_SH = self._all_to_all(rows_RH.contiguous(), self._received, self._sent)
        return rows_SH.index_select(0, self._place_S).view(-1, self.per_token, rows_RH.shape[1])

    def _all_to_all(self, rows: Tensor, counts: Sequence[int], received_counts: Sequence[int]) -> Tensor:
        received = rows.new_empty(sum(received_counts), rows.shape[1])
        distributed.all_to_all_single(received, rows, list(received_counts), list(counts), group=self._group)
        return received


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_experts(hidden_TH[:, None].expand(-1, exchange.per_token, -1))

    @staticmethod
    def backward(ctx: Any, gradient_RH: Tensor) -> Any:
        return ctx.exchange.to_tokens(gradient_RH).sum(1), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(rows_RH)

    @staticmethod
    def backward(ctx: Any, gradient_TKH: Tensor) -> Any:
        return ctx.exchange.to_experts(gradient_TKH), None
