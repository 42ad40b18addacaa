"""Mixtures whose experts several processes divide: importable there."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.torch.experts.expert_parallel import (
    divided_stacks,
    exchange_tokens,
    expert_groups,
    join_expert_groups,
)
from rollgrad.adapters.models.torch.layers.sequence_parallel import join_sequence_group
from rollgrad.adapters.models.torch.loading.weight_shards import shard_rows
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.references import TorchReference
from tests.compiled_layers import AS_IT_IS, AS_WRITTEN, compiler
from tests.fakes import cluster, lora
from tests.fakes.cluster import FSDP
from tests.meeting_processes import fork_all, met
from tests.tiny_architectures import VOCABULARY, tiny_model

TIMEOUT = 300.0

LENGTHS = (9, 1, 5, 2)
"""Tokens of the sequence of each process."""


def sequence(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, VOCABULARY, (1, LENGTHS[rank]), generator=generator)


def passed(model: Any, tokens: Tensor) -> dict[str, Any]:
    """Returns the `logits` of a sequence, and `gradients` of a sum of them, by parameter name."""
    model.zero_grad()
    logits_TV = model(input_ids=tokens, use_cache=False).logits[0]
    weights_TV = torch.linspace(-1, 1, logits_TV.numel()).view_as(logits_TV)
    (weights_TV * logits_TV).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits_TV.detach(), "gradients": gradients}


def keep_own_experts(model: Any) -> None:
    """Leaves a process its own experts, which exchange tokens with the others."""
    groups = expert_groups()
    assert groups is not None
    rank = groups.mesh.get_local_rank("experts")
    for stack in divided_stacks(model):
        for name, parameter in list(stack.named_parameters()):
            own = parameter.detach().chunk(groups.size)[rank].clone()
            setattr(stack, name, nn.Parameter(own))
        exchange_tokens(stack)


def work(folder: Path, timeout: float, rank: int, processes: int, families: list[str]) -> None:
    """One of the processes: its results go to the file `<rank>` of `folder`."""
    with met(folder, timeout, rank, processes):
        join_expert_groups(2, timeout=timeout)
        results = {}
        for family in families:
            model = tiny_model(family)
            keep_own_experts(model)
            results[family] = passed(model, sequence(rank))
        torch.save(results, folder / str(rank))


def rank_policy(
    path: str,
    size: int,
    offload: bool = False,
    settings: OptimizerSettings = cluster.SETTINGS,
    dtype: torch.dtype = torch.float32,
    aux_loss_coef: float = 0.0,
    width: int = 1,
) -> "PartPolicy":
    """`size` processes divide the experts, and `width` the sequences."""
    join_sequence_group(width, timeout=TIMEOUT)
    join_expert_groups(size, timeout=TIMEOUT)
    optimize = cluster.divided(FSDP, offload)
    return PartPolicy(
        cluster.policy(path, optimize, settings=settings, dtype=dtype, aux_loss_coef=aux_loss_coef, shard=shard_rows)
    )


class PartPolicy(RankPolicy):
    """Says what its process has of the experts."""

    def own_experts(self) -> dict[str, Tensor]:
        """Its rows of each stack."""
        named = self.policy.module.named_parameters()
        return {name: p.detach().to_local().clone() for name, p in named if ".experts." in name}


def rank_replaying(path: str, size: int) -> RankPolicy:
    join_expert_groups(size, timeout=TIMEOUT)
    return cluster.rank_replaying(path, FSDP)


def rank_adapted(path: str, size: int) -> RankPolicy:
    join_expert_groups(size, timeout=TIMEOUT)
    return lora.rank_policy(path, FSDP)


def rank_compiled(path: str, stage: int | str, size: int, adapted: bool) -> cluster.CompiledPolicy:
    """`size` processes divide the experts."""
    join_expert_groups(size, timeout=TIMEOUT)
    make = partial(lora.policy, lora=lora.WITHOUT_DROPOUT) if adapted else cluster.policy
    with compiler(AS_WRITTEN if adapted else AS_IT_IS):
        return cluster.CompiledPolicy(make(path, cluster.divided(stage), shard=cluster.loading(stage), compiles=True))


def rank_reference(path: str, size: int) -> TorchReference:
    """Its model need not have experts."""
    join_expert_groups(size, timeout=TIMEOUT, required=False)
    return cluster.rank_reference(path, FSDP)


if __name__ == "__main__":
    fork_all(work, tiny_model)
