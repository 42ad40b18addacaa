"""The processes of a run: who runs where, how many, and what each of them holds.

What runs in the other processes is made there, from the same settings, by the `rank_*` functions. Does not own: what
the processes do (`adapters.ray`).
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rollgrad.adapters.engines.ray_vllm import start_engines
from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.ray.sharded import (
    RankPolicy,
    ShardedPolicy,
    ShardedReference,
    ShardedValue,
    reward_copies,
)
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.models import TorchPolicy, TorchReference, TorchValue
from rollgrad.adapters.models.torch.sequence_parallel import join_sequence_group
from rollgrad.adapters.ray.placement import Placement, Slot
from rollgrad.adapters.ray.session import RaySession, cluster_has_gpus
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.entrypoints.composition.algorithm import critic_kind, reference_kind
from rollgrad.entrypoints.composition.data import make_tokenizer
from rollgrad.entrypoints.composition.extensions import load_extension
from rollgrad.entrypoints.composition.factories import (
    make_critic,
    make_optimizer,
    make_reference_model,
    make_trained_actor,
    vllm_settings,
)
from rollgrad.entrypoints.composition.rewards import make_reward_model


def rank_policy(config: RLConfig, rollouts: int) -> RankPolicy:
    """One process's part of the actor."""
    load_extension(config)
    _join_group(config)
    return RankPolicy(
        TorchPolicy(
            make_trained_actor(config),
            make_tokenizer(config),
            make_optimizer(config.actor, config, rollouts),
            temperature=config.rollout.temperature,
            gradient_checkpointing=config.actor.gradient_checkpointing,
            aux_loss_coef=config.actor.aux_loss_coef,
            optimize=_divided(config),
        )
    )


def rank_critic(config: RLConfig, rollouts: int) -> TorchValue:
    """One process's part of the critic."""
    load_extension(config)
    _join_group(config)
    tokenizer = make_tokenizer(config)
    settings = make_optimizer(config.critic, config, rollouts)
    return make_critic(config, tokenizer, settings, optimize=_divided(config))


def rank_reference(config: RLConfig) -> TorchReference:
    """The reference, whole in each process or group that shares its layers."""
    _join_group(config)
    model = make_reference_model(config)
    divide = partial(tensor_parallel.divided, size=config.ds.tensor_parallel_size)
    return TorchReference(model, temperature=config.rollout.temperature, divide=divide)


def _join_group(config: RLConfig) -> None:
    """The processes that share the tokens of each pass of the model that is made next."""
    join_sequence_group(config.ds.sequence_parallel_size, timeout=config.cluster.timeout)


def _divided(config: RLConfig) -> Callable[..., DeepSpeedModule]:
    ds = config.ds
    settings = DeepSpeedSettings(
        zero_stage=ds.zero_stage,
        adam_offload=ds.adam_offload,
        param_offload=ds.param_offload,
        tensor_parallel_size=ds.tensor_parallel_size,
    )
    return partial(DeepSpeedModule, division=settings)


def neighbours(role: str, roles: Mapping[str, int], train: TrainConfig) -> list[str]:
    """The roles whose processes run on the same bundles as those of `role`, itself included; `roles` has the number of
    each role's processes, 0 of those that the run does not have."""
    together = [
        set(roles) if train.colocate_all else set(),
        {"actor", "reference"} if train.colocate_actor_ref else set(),
        {"critic", "reward"} if train.colocate_critic_reward else set(),
    ]
    sharing = next((group for group in together if role in group), {role})
    return sorted(name for name in sharing if roles[name])


class Cluster:
    """Starts what the run needs when it is asked for it, and ends it all on `close`.

    Raises:
        ConfigurationError: there is no such cluster, or no room in it.
        MissingExtraError: Ray, DeepSpeed or vLLM is not installed.
    """

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._width = config.ds.sequence_parallel_size * config.ds.tensor_parallel_size
        self._roles = {
            "actor": ranks(config, "actor"),
            "critic": ranks(config, "critic") if critic_kind(config) == "loaded" else 0,
            "reference": ranks(config, "ref") if reference_kind(config) == "loaded" else 0,
            "reward": ranks(config, "reward") if config.reward.model_name_or_path is not None else 0,
            "engines": config.vllm.num_engines if config.rollout.engine is Engine.VLLM else 0,
        }
        self._session = RaySession(config.cluster.address, cpus=sum(self._roles.values()))
        self.gpus = torch.cuda.is_available() or cluster_has_gpus()
        """Whether there are any."""
        self._placements: dict[str, Placement] = {}
        self._groups: list[WorkerGroup] = []

    def policy(self, rollouts: int) -> ShardedPolicy:
        """The actor."""
        return ShardedPolicy(self._group("actor", rank_policy, self._config, rollouts), width=self._width)

    def critic(self, rollouts: int) -> ShardedValue:
        """The critic."""
        return ShardedValue(self._group("critic", rank_critic, self._config, rollouts), width=self._width)

    def reference(self) -> ShardedReference:
        """The reference."""
        return ShardedReference(self._group("reference", rank_reference, self._config), width=self._width)

    def reward(self) -> ModelReward:
        """The reward model."""
        return ModelReward(
            reward_copies(self._group("reward", make_reward_model, self._config)), timeout=self._config.reward.timeout
        )

    def engines(self, tokenizer: Any, plays: bool) -> EngineFleet:
        """The vLLM engines; `plays` says whether episodes have several turns."""
        config = self._config
        at_once = self._roles["engines"] + (self._roles["actor"] if config.train.async_enable else 0)
        threads = _threads_each(at_once)  # Ray would give each as many as it has CPUs reserved
        settings = vllm_settings(config, tokenizer, gpus=self.gpus, plays=plays) | {"threads": threads}
        options = [slot.options() for slot in self._slots("engines", self._roles["engines"])]
        engines = start_engines(len(options), settings, options=options, seconds=config.cluster.timeout)
        return EngineFleet(asyncio.run(engines))

    def close(self) -> None:
        """Ends models and, if it was started here, Ray; may be called again."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        placements, self._placements = self._placements, {}
        for placement in placements.values():
            placement.remove()
        self._session.close()

    def _group(self, role: str, make: Callable[..., Any], *arguments: Any) -> WorkerGroup:
        config = self._config
        size = self._roles[role]
        on_a_node = min(size, getattr(config, "ref" if role == "reference" else role).num_gpus_per_node or size)
        group = WorkerGroup(
            role,
            self._slots(role, size),
            threads=_threads_each(on_a_node),
            timeout=config.cluster.timeout,
        )
        self._groups.append(group)
        group.build(make, *arguments)
        return group

    def _slots(self, role: str, size: int) -> list[Slot]:
        """Where the processes of a role run: on bundles of their own, or on those that several roles share."""
        sharing = neighbours(role, self._roles, self._config.train)
        name = " and ".join(sharing)
        if name not in self._placements:
            gpus = float(self.gpus)
            if role == "engines":
                gpus *= self._config.vllm.gpus_per_engine
            self._placements[name] = Placement(
                name,
                max(self._roles[each] for each in sharing),
                gpus=gpus,
                here=int("actor" in sharing),  # weights leave by its first process's shared memory
                shared=len(sharing) > 1,
                timeout=self._config.cluster.timeout,
            )
        return [self._placements[name].slot(index) for index in range(size)]


def _threads_each(processes: int) -> int:
    """Threads of processes that share a machine's cores, which is taken to be like this one."""
    return max(1, (os.cpu_count() or 1) // processes)
