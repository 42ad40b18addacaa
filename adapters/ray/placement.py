"""Placement of processes: bundles of CPUs and GPUs that Ray reserves together, each for one process or several
roles."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog
from attrs import evolve, field, frozen

from rollgrad.adapters.ray.session import own_gpus, ray_module
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

SHARE = 0.2
"""Share of a bundle's CPU and GPU for a process that shares the bundle with other roles."""

MACHINE = "ray.io/node-id"
"""Label by which Ray names a machine."""


@frozen(kw_only=True)
class Slot:
    """Resources of one process, as options of its Ray actor."""

    cpus: float
    gpus: float
    strategy: Any = field(eq=False)
    devices: tuple[str, ...] = ()
    """Ids of the GPUs of several bundles, which the process has to show itself; without them Ray shows it its own."""

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `ray.remote(...).options`."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": self.strategy}


class Placement:
    """A reservation of `bundles` bundles, each of one CPU and `gpus` GPUs, packed onto as few machines as they fit.

    Neighbouring processes have neighbouring bundles: those of one machine follow each other, in whatever order Ray has
    spread them.

    Args:
        name: name of the role, for errors.
        bundles: how many.
        gpus: GPUs of each bundle; 0 on machines without.
        here: number of bundles, those of the first processes, that must be on this process's machine.
        shared: whether several roles share each bundle.
        timeout: longest wait for Ray to find room, in seconds.

    Raises:
        ConfigurationError: the cluster has no room for it in time.
    """

    def __init__(
        self, name: str, bundles: int, *, gpus: float, here: int = 0, shared: bool = False, timeout: float
    ) -> None:
        ray = ray_module()
        from ray.util.placement_group import placement_group, placement_group_table

        machine = ray.get_runtime_context().get_node_id()
        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        self._name = name
        self._share = SHARE if shared else 1.0
        self._gpus = gpus
        self._timeout = timeout
        self._group = placement_group(
            [bundle] * bundles,
            strategy="PACK",
            bundle_label_selector=[{MACHINE: machine}] * here + [{}] * (bundles - here),
        )
        with waiting_for(
            f"room for {bundles} {'process' if bundles == 1 else 'processes'} of {name}", deadline=timeout
        ):
            ready, _ = ray.wait([self._group.ready()], timeout=timeout)
            if not ready:
                self.remove()
                there = {key: value for key, value in ray.cluster_resources().items() if key in ("CPU", "GPU")}
                raise ConfigurationError(
                    f"Ray found no room for the {bundles} processes of {name} within {timeout:g} s: each needs "
                    f"{bundle}, {here} of them on this machine, and the cluster has {there} in all. Add nodes, ask for "
                    "fewer processes, or share them with --train.colocate_all."
                )
        machines = placement_group_table(self._group)["bundles_to_node_id"]
        self._machines = [machines[index] for index in range(bundles)]
        """Machine of each bundle."""
        self._order = by_machine(self._machines, machine)
        """Bundle of each process."""

    def slot(self, index: int) -> Slot:
        """Returns the slot of process `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=self._order[index],
            placement_group_capture_child_tasks=True,
        )
        return Slot(cpus=self._share, gpus=self._gpus * self._share, strategy=strategy)

    def spread(self, first: int, size: int) -> int:
        """Returns the number of machines that processes `first` to `first + size - 1` are on."""
        return len({self._machines[bundle] for bundle in self._order[first : first + size]})

    def joint_slot(self, first: int, size: int) -> Slot:
        """Returns the slot of an actor whose own processes use the GPUs of processes `first` to `first + size - 1`.

        Ray gives an actor resources of one bundle alone. So the actor takes its share of the first bundle, and has to
        show itself the GPUs of the others by their ids. Its share of those stays free: no other run gets into the
        bundles, and the roles of this one take no more than their shares.

        Raises:
            ConfigurationError: they are on several machines.
        """
        slots = [self.slot(index) for index in range(first, first + size)]
        if size == 1:
            return slots[0]
        if (machines := self.spread(first, size)) > 1:
            raise ConfigurationError(
                f"Ray spread the processes of {self._name} such that {size} neighbours, whose GPUs one engine shares, "
                f"are on {machines} machines, but an engine is on one: lower --vllm.tensor_parallel_size or "
                "--vllm.pipeline_parallel_size, or ask for as many processes as make whole engines on each machine."
            )
        return evolve(slots[0], devices=self._devices(slots) if self._gpus else ())

    def _devices(self, slots: Sequence[Slot]) -> tuple[str, ...]:
        """Returns the ids of the GPUs in the bundles of `slots`."""
        ray = ray_module()
        look = ray.remote(own_gpus)
        found = ray.get([look.options(**slot.options()).remote() for slot in slots], timeout=self._timeout)
        return tuple(device for devices in found for device in devices)

    def remove(self) -> None:
        """Returns the reservation; processes in it are killed. Where Ray does not answer, it ends with this process."""
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        try:
            remove_placement_group(self._group)
        except RayError as error:
            log.warning(
                "Ray does not take a reservation back: it ends with this process", of=self._name, reason=str(error)
            )


def by_machine(machines: Sequence[str], first: str) -> list[int]:
    """Returns the numbers of bundles, given the machine of each, so that those of a machine are neighbours: `first`
    comes first, then the machine with most of them."""
    count = Counter(machines)
    return sorted(
        range(len(machines)), key=lambda bundle: (machines[bundle] != first, -count[machines[bundle]], machines[bundle])
    )
