"""The processes of a run: their number, their places, and the models in them.

Objects of other processes are made there, from the same settings, by the providers of the same container
(`rank_model`). Does not own: the code of the processes (`adapters/models/ray`, `adapters/engines/ray_vllm.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeVar

import structlog
from attrs import evolve, frozen

from rollgrad.adapters.engines.ray_vllm import RayVLLMEngine, start_engines
from rollgrad.adapters.models.deepspeed.forward_only import forward_only
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.fsdp import division
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.ray.rank_worker import begin_workers, end_workers, start_by_deepspeed
from rollgrad.adapters.models.ray.replaced_group import ReplacedGroup
from rollgrad.adapters.models.ray.sharded import (
    ShardedPolicy,
    ShardedReference,
    ShardedReward,
    ShardedValue,
    divided_reward,
    reward_copies,
)
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.experts.expert_parallel import join_expert_groups
from rollgrad.adapters.models.torch.layers.sequence_parallel import join_sequence_group
from rollgrad.adapters.models.torch.loading.weight_shards import shard_rows
from rollgrad.adapters.ray.placement import Placement, Slot
from rollgrad.adapters.ray.session import RaySession, cluster_gpus
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.system.cores import usable_cores
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.derived import divides_reward
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.anywhere import absolute, with_absolute_paths
from rollgrad.entrypoints.composition.injection import providers

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")
MakeContainer = Callable[[Any], Any]
"""Makes a run's container from its settings; other processes import it by its name."""


ACTORS = ("local_policy", "local_reward")
"""Providers of the model that the section `actor` names. Under `cluster.expert_parallel_size` it must have experts;
models of other sections may have none."""


def rank_model(make: MakeContainer, model: str, config: Any, steps: int = 0) -> Any:
    """Makes one process's part of a model, whose weights are divided as `cluster.strategy` says.

    Args:
        make: makes the run's container.
        model: the container's provider: `local_policy`, `local_critic`, `local_reference`, `reward_model` or, of one
            that is trained, `local_reward`.
        config: the run's settings.
        steps: optimizer steps of the whole run; a model without optimizer needs none.
    """
    made = make(config)
    made.extension()
    ds = config.ds
    width = 1 if model == "reward_model" else ds.sequence_parallel_size  # its processes share no sequences
    join_sequence_group(width, timeout=config.cluster.timeout)  # of the model that is made next
    join_expert_groups(config.cluster.expert_parallel_size, timeout=config.cluster.timeout, required=model in ACTORS)
    rests = (model == "local_reference" and config.ref.offload) or (model == "reward_model" and config.reward.offload)
    optimize, divide, shard = DIVISIONS[config.cluster.strategy](config, rests)
    made.optimize.override(providers.Object(optimize))
    made.divide.override(providers.Object(divide))
    made.shard.override(providers.Object(shard))
    made.total_steps.override(providers.Object(steps))
    part = made.providers[model]()
    if model in ("local_policy", "local_critic") and getattr(config.train, "optimizer_sleeps", False):
        part.sleep()  # engines take their memory before the first update
    return part


Division = tuple[Callable[..., Any], Callable[..., Any], Any]
"""Functions that divide a model that is trained, a frozen one, and any model while it loads (None: none)."""


def _by_deepspeed(config: Any, rests: bool) -> Division:
    """Returns DeepSpeed's; if a model `rests`, its parameters are in the CPU's memory."""
    ds = config.ds
    settings = DeepSpeedSettings(
        zero_stage=ds.zero_stage,
        adam_offload=ds.adam_offload,
        param_offload=ds.param_offload,
        tensor_parallel_size=ds.tensor_parallel_size,
        extra=ds.extra or {},
    )
    if rests:
        settings = evolve(settings, zero_stage=PARAMETERS, param_offload=True)
    shard = shard_rows if settings.zero_stage == PARAMETERS or settings.tensor_parallel_size > 1 else None
    return partial(DeepSpeedModule, division=settings), partial(forward_only, division=settings), shard


def _by_fsdp2(config: Any, rests: bool) -> Division:
    """Returns FSDP2's; if a model `rests`, its parameters are in the CPU's memory."""
    offload = config.cluster.offload or rests
    return partial(FSDPTrainedModule, offload=offload), partial(division.divide, offload=offload), shard_rows


DIVISIONS: Mapping[Strategy, Callable[[Any, bool], Division]] = {
    Strategy.DEEPSPEED: _by_deepspeed,
    Strategy.FSDP2: _by_fsdp2,
}
STARTS = {Strategy.DEEPSPEED: start_by_deepspeed, Strategy.FSDP2: division.start_process_group}
"""Functions by which processes join a group."""
MODULES = (
    "rollgrad.entrypoints.composition.rl.container",
    "rollgrad.adapters.models.torch.models",
    "transformers.modeling_utils",
)
"""Modules that the processes of lasting roles import, beside those of `LIBRARIES`, while they wait for their turn."""
LIBRARIES: Mapping[Strategy, tuple[str, ...]] = {Strategy.DEEPSPEED: ("deepspeed",), Strategy.FSDP2: ()}


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


DIVIDED = frozenset({"actor", "critic", "reference"})
"""Roles of which neighbouring processes may share sequences or layers."""


@frozen
class Role:
    """The number of a role's processes in the cluster, and of those on one machine; `lasting`: whether the run has
    their model from its beginning to its end."""

    processes: int
    on_a_machine: int
    lasting: bool = False


def keep_roles(container: Any, *kept: str) -> None:
    """Leaves other roles out of the cluster, where a command needs none of them: they take no places in it."""
    roles = {name: role if name in kept else Role(0, 0) for name, role in container.roles().items()}
    container.roles.override(providers.Object(roles))


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
        self._config = with_absolute_paths(config)
        self._width = config.ds.sequence_parallel_size * config.ds.tensor_parallel_size
        self._roles = roles
        self._processes = {name: role.processes for name, role in roles.items()}
        self._colocated = colocated
        cpus = sum(count * self._gpus_of(name) for name, count in self._processes.items())
        self._session = RaySession(config.cluster.address, cpus=cpus)
        self._gpus = cluster_gpus()
        if config.cluster.address is None and 0 < self._gpus < (needed := self._needed_gpus()):
            self._session.close()
            raise ConfigurationError(
                f"The run asks for {needed:g} GPUs, but this machine has {self._gpus:g}: ask for fewer processes or "
                "engines, let roles share GPUs with --train.colocate_all, or join a cluster of several machines."
            )
        self._placements: dict[str, Placement] = {}
        self._groups: list[WorkerGroup | ReplacedGroup] = []
        self._engines: list[RayVLLMEngine] = []
        self._begun: dict[str, list[Any]] | None = None
        """Processes of lasting roles that have no model yet; None before any of them has begun."""

    @property
    def gpus(self) -> bool:
        """Whether the cluster has GPUs."""
        return self._gpus > 0

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
        """Starts the reference, divided like the actor's parameters; its processes are replaced when one is lost."""
        parts = (rank_model, make, "local_reference", self._config)
        return ShardedReference(self._replaced_group("reference", *parts), width=self._width)

    def reward(self, make: MakeContainer) -> ModelReward:
        """Starts the reward model: divided like the reference, or whole in each of its processes, which are replaced
        when one is lost."""
        timeout = self._config.reward.timeout
        if divides_reward(self._config):
            group = self._replaced_group("reward", rank_model, make, "reward_model", self._config)
            return ModelReward(divided_reward(group), timeout=timeout, width=group.size)
        group = self._replaced_group("reward", rank_reward, make, self._config)
        return ModelReward(reward_copies(group), timeout=timeout)

    def engines(self, settings: Mapping[str, Any], beside_training: bool) -> EngineFleet:
        """Starts the vLLM engines, with `settings` as arguments; `beside_training` says whether they sample while
        models train."""
        at_once = self._processes["engines"] + (self._processes["actor"] if beside_training else 0)
        threads = _threads_each(at_once)  # Ray would give each as many as it has CPUs reserved
        slots, seconds = self._slots("engines"), self._config.cluster.timeout
        engines = start_engines(
            len(slots),
            {**settings, "model": absolute(settings["model"]), "threads": threads},
            options=[slot.options() for slot in slots],
            devices=[slot.devices for slot in slots],
            seconds=seconds,
        )
        self._engines = run_to_end(engines)
        # A replacement takes as long to start as its predecessor, and requests wait for it where no other is left.
        failed = {number: engine.not_started for number, engine in enumerate(self._engines) if engine.not_started}
        return EngineFleet(self._engines, not_started=failed, restart_seconds=seconds, wait_seconds=seconds)

    def end(self, role: str) -> None:
        """Ends the processes of a role, if there are any; their places are free for others, or for it again."""
        ended = [group for group in self._groups if group.name == role]
        self._groups = [group for group in self._groups if group.name != role]
        for group in ended:
            group.close()

    async def begin_profile(self) -> None:
        """Implements `Profiled.begin_profile`, in the processes of models and of engines."""
        for group in self._groups:
            group.begin_profile()
        await self._answers(RayVLLMEngine.begin_profile)

    async def end_profile(self) -> dict[str, bytes]:
        """Implements `Profiled.end_profile`."""
        traces = {name: trace for group in self._groups for name, trace in group.end_profile().items()}
        for number, of_engine in (await self._answers(RayVLLMEngine.end_profile)).items():
            traces |= {f"engine-{number}-{name}": trace for name, trace in of_engine.items()}
        return traces

    async def _answers(self, call: Callable[[RayVLLMEngine], Awaitable[Answer]]) -> dict[int, Answer]:
        """Returns the engines' answers by their numbers; one that is being replaced has none, which is reported."""
        found: dict[int, Answer] = {}
        answers = await asyncio.gather(*map(call, self._engines), return_exceptions=True)
        for number, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                log.warning("an engine has no profile", engine=number, reason=str(answer))
            else:
                found[number] = answer
        return found

    def close(self) -> None:
        """Ends models and, if it was started here, Ray; may be called again.

        Raises:
            WorkerError: Ray, which was started here, had died; only once.
        """
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        begun, self._begun = self._begun, None
        for workers in (begun or {}).values():
            end_workers(workers)
        placements, self._placements = self._placements, {}
        for placement in placements.values() if self._session.lost is None else ():
            placement.remove()
        self._session.close()

    def _group(self, name: str, make: Callable[..., Any], *arguments: Any) -> WorkerGroup:
        group = self._started(name, make, *arguments)
        self._groups.append(group)
        return group

    def _replaced_group(self, name: str, make: Callable[..., Any], *arguments: Any) -> ReplacedGroup:
        group = ReplacedGroup(lambda: self._started(name, make, *arguments))
        self._groups.append(group)
        return group

    def _started(self, name: str, make: Callable[..., Any], *arguments: Any) -> WorkerGroup:
        config = self._config
        group = WorkerGroup(
            name,
            self._workers(name),
            timeout=config.cluster.timeout,
            start=STARTS[config.cluster.strategy],
        )
        try:
            group.build(make, *arguments)
        except BaseException:
            group.close()
            raise
        return group

    def _workers(self, name: str) -> list[Any]:
        """Returns the processes of a role. Those of all lasting roles begin with the first of them: they make their
        imports, which take longer than a small model takes to load, side by side."""
        if self._begun is None and self._roles[name].lasting:
            lasting = [each for each, role in self._roles.items() if role.lasting and role.processes]
            self._begun = {each: self._begin(each) for each in lasting}
        begun = None if self._begun is None else self._begun.pop(name, None)
        return self._begin(name) if begun is None else begun

    def _begin(self, name: str) -> list[Any]:
        role = self._roles[name]
        modules = (*MODULES, *LIBRARIES[self._config.cluster.strategy]) if role.lasting else ()
        return begin_workers(self._slots(name), threads=_threads_each(role.on_a_machine), modules=modules)

    def _bundles(self, role: str) -> tuple[Mapping[str, int], int, int]:
        """Returns the bundles of a process of each role that shares those of `role`, itself included, the number of all
        these bundles, and that of the GPUs of each on a cluster that has any.

        An engine over several GPUs has a bundle with all of them for itself; of bundles with one GPU each, which it
        shares, it takes as many neighbours.
        """
        sharing = neighbours(role, self._processes, self._colocated)
        bundles = {each: self._gpus_of(each) if len(sharing) > 1 else 1 for each in sharing}
        count = max(self._processes[each] * bundles[each] for each in sharing)
        return bundles, count, self._gpus_of(role) // bundles[role]

    def _needed_gpus(self) -> int:
        """Returns the number of GPUs of all bundles."""
        found = (self._bundles(role) for role, size in self._processes.items() if size)
        return sum({tuple(bundles): count * gpus for bundles, count, gpus in found}.values())

    def _slots(self, role: str) -> list[Slot]:
        """Returns the places of a role's processes: on bundles of their own, or on bundles that several roles share."""
        bundles, count, gpus = self._bundles(role)
        name, size = " and ".join(bundles), self._processes[role]
        if name not in self._placements:
            self._placements[name] = Placement(
                name,
                count,
                gpus=float(gpus if self.gpus else 0),
                # The actor's first process, which sends weights through shared memory, and all GPUs of its engine.
                here=max(bundles.values()) if "actor" in bundles else 0,
                shared=len(bundles) > 1,
                timeout=self._config.cluster.timeout,
            )
        placement = self._placements[name]
        if role in DIVIDED and any(placement.spread(first, self._width) > 1 for first in range(0, size, self._width)):
            log.warning("processes that share sequences or layers are on several machines", role=role, of=self._width)
        return [placement.joint_slot(index * bundles[role], bundles[role]) for index in range(size)]

    def _gpus_of(self, role: str) -> int:
        """Returns the number of GPUs of each process of a role, where there are any."""
        return int(self._config.vllm.gpus_per_engine) if role == "engines" else 1


def _threads_each(processes: int) -> int:
    """Returns the number of threads of each process on a machine, which is assumed to be like this one."""
    return max(1, usable_cores() // processes)
