"""Placement of processes: bundles of CPUs and GPUs that Ray reserves together, each for one process or several
roles."""

from typing import Any

from attrs import field, frozen

from rollgrad.adapters.ray.session import ray_module
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.domain.errors import ConfigurationError

SHARE = 0.2
"""Share of a bundle's CPU and GPU for a process that shares the bundle with other roles."""


NODE_SHARE = 0.001
"""Amount of the resource by which Ray names a machine."""


@frozen(kw_only=True)
class Slot:
    """Resources of one process, as options of its Ray actor."""

    cpus: float
    gpus: float
    strategy: Any = field(eq=False)

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `ray.remote(...).options`."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": self.strategy}


class Placement:
    """A reservation of `bundles` bundles, each of one CPU and `gpus` GPUs, packed onto as few nodes as they fit.

    Args:
        name: of the role, for errors.
        bundles: how many.
        gpus: GPUs of each bundle; 0 on machines without.
        here: number of bundles, the first ones, that must be on this process's machine.
        shared: whether several roles share each bundle.
        timeout: longest wait for Ray to find room, in seconds.

    Raises:
        ConfigurationError: the cluster has no room for it in time.
    """

    def __init__(
        self, name: str, bundles: int, *, gpus: float, here: int = 0, shared: bool = False, timeout: float
    ) -> None:
        ray = ray_module()
        from ray.util import get_node_ip_address
        from ray.util.placement_group import placement_group

        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        local = bundle | {f"node:{get_node_ip_address()}": NODE_SHARE}
        self._share = SHARE if shared else 1.0
        self._gpus = gpus
        self._group = placement_group([local] * here + [bundle] * (bundles - here), strategy="PACK")
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

    def slot(self, index: int) -> Slot:
        """Returns the slot of process `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
        )
        return Slot(cpus=self._share, gpus=self._gpus * self._share, strategy=strategy)

    def remove(self) -> None:
        """Returns the reservation; processes in it are killed."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)
