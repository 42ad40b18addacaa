"""The processes of a run: their number, their places, and the models in them.

Objects of other processes are made there, from the same settings, by the providers of the same container
(`rank_model`). Does not own: the code of the processes (`adapters/models/ray`, `adapters/engines/ray_vllm.py`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from attrs import frozen
from dependency_injector import providers

from rollgrad.adapters.engines.ray_vllm import start_engines
from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.ray.sharded import (
    RankPolicy,
    ShardedPolicy,
    ShardedReference,
    ShardedReward,
    ShardedValue,
    reward_copies,
)
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.sequence_parallel import join_sequence_group
from rollgrad.adapters.ray.placement import Placement, Slot
from rollgrad.adapters.ray.session import RaySession, cluster_has_gpus
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.entrypoints.event_loop import run_to_end

MakeContainer = Callable[[Any], Any]
"""Makes a run's container from its settings; other processes import it by its name."""


def rank_model(make: MakeContainer, model: str, config: Any, steps: int = 0) -> Any:
    """Makes one process's part of a model, whose weights DeepSpeed divides.

    Args:
        make: makes the run's container.
        model: the container's provider: `local_policy`, `local_critic`, `local_reference` or `local_reward`.
        config: the run's settings.
        steps: optimizer steps of the whole run; a model without optimizer needs none.
    """
    made = make(config)
    made.extension()
    ds = config.ds
    join_sequence_group(ds.sequence_parallel_size, timeout=config.cluster.timeout)  # of the model that is made next
    settings = DeepSpeedSettings(
        zero_stage=ds.zero_stage,
        adam_offload=ds.adam_offload,
        param_offload=ds.param_offload,
        tensor_parallel_size=ds.tensor_parallel_size,
    )
    made.optimize.override(providers.Object(partial(DeepSpeedModule, division=settings)))
    made.divide.override(providers.Object(partial(tensor_parallel.divided, size=ds.tensor_parallel_size)))
    made.total_steps.override(providers.Object(steps))
    return made.providers[model]()


def rank_policy(make: MakeContainer, config: Any, steps: int) -> RankPolicy:
    """Makes one process's part of the actor, which can be asked to send its weights."""
    return RankPolicy(rank_model(make, "local_policy", config, steps))


def rank_reward(make: MakeContainer, config: Any) -> Any:
    """Makes the reward model, whole in each process."""
    return make(config).providers["reward_model"]()


def neighbours(role: str, processes: Mapping[str, int], colocated: Sequence[AbstractSet[str]]) -> list[str]:
    """Returns the roles whose processes run on the same bundles as those of `role`, itself included.

    Args:
        role: one of those that the run has.
        processes: their number for each role, 0 of those that the run does not have.
        colocated: roles that share their GPUs; the first set that has a role counts.
    """
    sharing = next((group for group in colocated if role in group), {role})
    return sorted(name for name in sharing if processes[name])


@frozen
class Role:
    """The number of a role's processes in the cluster, and of those on one machine."""

    processes: int
    on_a_machine: int


class Cluster:
    """Starts the processes that the run requests, and ends them all on `close`.

    Args:
        config: its sections `cluster`, `ds`, and for engines `vllm`, are read.
        roles: `actor` and, where the run has them, `critic`, `reference`, `reward` and `engines`.
        colocated: roles that share the same GPUs.

    Raises:
        ConfigurationError: there is no such cluster, or no room in it.
        MissingExtraError: Ray, DeepSpeed or vLLM is not installed.
    """

    def __init__(self, config: Any, roles: Mapping[str, Role], colocated: Sequence[AbstractSet[str]]) -> None:
        self._config = config
        self._width = config.ds.sequence_parallel_size * config.ds.tensor_parallel_size
        self._roles = roles
        self._processes = {name: role.processes for name, role in roles.items()}
        self._colocated = colocated
        self._session = RaySession(config.cluster.address, cpus=sum(self._processes.values()))
        self.gpus = torch.cuda.is_available() or cluster_has_gpus()
        """Whether the cluster has GPUs."""
        self._placements: dict[str, Placement] = {}
        self._groups: list[WorkerGroup] = []

    def policy(self, make: MakeContainer, steps: int) -> ShardedPolicy:
        """Starts the actor, which each process makes as `rank_policy` says."""
        return ShardedPolicy(self._group("actor", rank_policy, make, self._config, steps), width=self._width)

    def critic(self, make: MakeContainer, steps: int) -> ShardedValue:
        """Starts the critic."""
        parts = (rank_model, make, "local_critic", self._config, steps)
        return ShardedValue(self._group("critic", *parts), width=self._width)

    def trained_reward(self, make: MakeContainer, steps: int) -> ShardedReward:
        """Starts the reward model that is trained, in the actor's processes."""
        parts = (rank_model, make, "local_reward", self._config, steps)
        return ShardedReward(self._group("actor", *parts), width=self._width)

    def reference(self, make: MakeContainer) -> ShardedReference:
        """Starts the reference, whole in each process or group that shares its layers."""
        parts = (rank_model, make, "local_reference", self._config)
        return ShardedReference(self._group("reference", *parts), width=self._width)

    def reward(self, make: MakeContainer) -> ModelReward:
        """Starts the reward model."""
        group = self._group("reward", rank_reward, make, self._config)
        return ModelReward(reward_copies(group), timeout=self._config.reward.timeout)

    def engines(self, settings: Mapping[str, Any], beside_training: bool) -> EngineFleet:
        """Starts the vLLM engines, with `settings` as arguments; `beside_training` says whether they sample while
        models train."""
        at_once = self._processes["engines"] + (self._processes["actor"] if beside_training else 0)
        threads = _threads_each(at_once)  # Ray would give each as many as it has CPUs reserved
        options = [slot.options() for slot in self._slots("engines", self._processes["engines"])]
        engines = start_engines(
            len(options), {**settings, "threads": threads}, options=options, seconds=self._config.cluster.timeout
        )
        return EngineFleet(run_to_end(engines))

    def end(self, role: str) -> None:
        """Ends the processes of a role, if there are any; their places are free for others, or for it again."""
        ended = [group for group in self._groups if group.name == role]
        self._groups = [group for group in self._groups if group.name != role]
        for group in ended:
            group.close()

    def close(self) -> None:
        """Ends models and, if it was started here, Ray; may be called again."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        placements, self._placements = self._placements, {}
        for placement in placements.values():
            placement.remove()
        self._session.close()

    def _group(self, name: str, make: Callable[..., Any], *arguments: Any) -> WorkerGroup:
        config, role = self._config, self._roles[name]
        group = WorkerGroup(
            name,
            self._slots(name, role.processes),
            threads=_threads_each(role.on_a_machine),
            timeout=config.cluster.timeout,
        )
        self._groups.append(group)
        group.build(make, *arguments)
        return group

    def _slots(self, role: str, size: int) -> list[Slot]:
        """Returns the places of a role's processes: on bundles of their own, or on bundles that several roles share."""
        sharing = neighbours(role, self._processes, self._colocated)
        name = " and ".join(sharing)
        if name not in self._placements:
            gpus = float(self.gpus)
            if role == "engines":
                gpus *= self._config.vllm.gpus_per_engine
            self._placements[name] = Placement(
                name,
                max(self._processes[each] for each in sharing),
                gpus=gpus,
                here=int("actor" in sharing),  # its first process sends weights through shared memory
                shared=len(sharing) > 1,
                timeout=self._config.cluster.timeout,
            )
        return [self._placements[name].slot(index) for index in range(size)]


def _threads_each(processes: int) -> int:
    """Returns the number of threads of each process on a machine, which is assumed to be like this one."""
    return max(1, (os.cpu_count() or 1) // processes)
