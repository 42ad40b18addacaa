"""Groups of worker processes that tests share: one takes longer to start than most tests take with it."""

from attrs import define, field

from rollgrad.adapters.models.ray.rank_worker import begin_workers
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.ray.placement import Placement
from tests.fakes import cluster

TIMEOUT = 300.0


class KeptGroup(WorkerGroup):
    """A group whose processes outlive `close`, for the next who asks."""

    lent = False

    def close(self) -> None:
        self.lent = False


@define
class KeptGroups:
    """The groups of one Ray."""

    _groups: dict[KeptGroup, Placement] = field(factory=dict)

    def group(self, size: int, name: str = "actor") -> KeptGroup:
        """Returns a whole group that nobody has, without a model. Those that have lost a process give up their room."""
        for broken in [one for one in self._groups if one._broken is not None and not one.lent]:
            self.end(broken)
        idle = (one for one in self._groups if one.size == size and not one.lent)
        group = next(idle, None) or self._started(size)
        group.name, group.lent = name, True
        group.build(cluster.idle)
        return group

    def end(self, group: KeptGroup) -> None:
        """Ends the processes of a group."""
        WorkerGroup.close(group)
        self._groups.pop(group).remove()

    def close(self) -> None:
        """Ends all."""
        for group in list(self._groups):
            self.end(group)

    def _started(self, size: int) -> KeptGroup:
        placement = Placement("kept", size, gpus=0, timeout=TIMEOUT)
        slots = [placement.slot(rank) for rank in range(size)]
        group = KeptGroup("kept", begin_workers(slots, threads=1), timeout=TIMEOUT)
        self._groups[group] = placement
        cluster.kept_pids.update(group.pids)
        return group
