"""Which groups an asynchronous run may start and train on, as a pure state machine: no clock, no thread, no I/O.

A policy version counts the updates that are finished; the lag of a token, or of a whole trajectory, is the version that
trains on it less the one that it began under. Nothing with a lag above `max_staleness` is ever trained on.

Invariants: groups submitted and not yet trained are at most (max_staleness + 1) x groups of an update, the capacity
rule of AReaL (Fu et al. 2025, section 4.1) counted from the version in training, so that whatever is started can be
trained in time; submitted = trained + dropped by reason + in flight. Under `wait` a batch leaves no group behind that
could only be trained too late. There always is a next batch as long as running groups end and what `stale` names is
dropped.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from attrs import define, field, frozen

STALE = "stale"
"""Why a group that became too old is dropped."""


class StalenessUnit(StrEnum):
    """From where the age of a group is counted."""

    TRAJECTORY = "trajectory"
    """The version when the group was started."""
    TOKEN = "token"
    """The version of its oldest sampled token, which is known when the group is finished."""


class StalePolicy(StrEnum):
    """What happens when a slow group would become too old."""

    WAIT = "wait"
    """Training waits for it: nothing is lost."""
    DROP = "drop"
    """Training goes on without it, and it is dropped: nothing waits."""


@frozen(kw_only=True)
class StalenessBound:
    """`max_staleness`: largest lag that is trained on, in policy versions. An update trains on `groups` groups; the run
    has `updates` of them."""

    groups: int
    updates: int
    max_staleness: int = 1
    unit: StalenessUnit = StalenessUnit.TRAJECTORY
    policy: StalePolicy = StalePolicy.WAIT


@define
class StalenessGate:
    """Hears what happens to groups, known by their ids, and says what may happen next.

    A group runs from `start` to `finish`, is ready from then to `take`, and in training until `updated`; `drop` ends it
    before.
    """

    bound: StalenessBound
    version: int = 0
    """Finished updates."""
    trained: int = 0
    """Groups that finished updates were made of."""
    dropped: Counter[str] = field(factory=Counter)
    """Groups that were not trained on, by reason."""
    _running: dict[int, int] = field(factory=dict)
    """Group: version when it was started."""
    _ready: dict[int, int] = field(factory=dict)
    """Group: version that its age counts from."""
    _training: tuple[int, ...] = ()
    _submitted: int = 0

    @classmethod
    def resumed(
        cls, bound: StalenessBound, *, version: int, trained: int, dropped: Mapping[str, int]
    ) -> "StalenessGate":
        """Returns the gate of a run that continues, with nothing in flight."""
        counts = Counter(dropped)
        return cls(bound, version, trained, counts, submitted=trained + counts.total())

    @property
    def submitted(self) -> int:
        """Groups ever started."""
        return self._submitted

    @property
    def running(self) -> int:
        """Groups being played."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Groups that wait to be trained on."""
        return len(self._ready)

    @property
    def in_flight(self) -> int:
        """Groups submitted that are neither trained nor dropped."""
        return len(self._running) + len(self._ready) + len(self._training)

    @property
    def room(self) -> int:
        """Groups that may be started now: as many as can be trained in time, and no more than the run still needs."""
        ahead = min(self.bound.max_staleness + 1, self.bound.updates - self.version)
        return max(0, ahead * self.bound.groups - self.in_flight)

    def start(self, group: int) -> None:
        """A group is started.

        Raises:
            ValueError: there is no room for it, or it is in flight already.
        """
        if self.room == 0 or group in self._running or group in self._ready or group in self._training:
            raise ValueError(f"Group {group} cannot be started: {self.in_flight} are in flight, with room {self.room}.")
        self._running[group] = self.version
        self._submitted += 1

    def finish(self, group: int, oldest_version: int) -> None:
        """A running group is ready; `oldest_version` drew its oldest token."""
        started = self._running.pop(group)
        self._ready[group] = oldest_version if self.bound.unit is StalenessUnit.TOKEN else started

    def drop(self, group: int, reason: str) -> None:
        """A running or ready group will not be trained on.

        Raises:
            ValueError: the group is neither.
        """
        if self._running.pop(group, None) is None and self._ready.pop(group, None) is None:
            raise ValueError(f"Group {group} is neither running nor ready, so it cannot be dropped.")
        self.dropped[reason] += 1

    def stale(self) -> list[int]:
        """Groups that can no longer be trained on; none under `wait`. They hold room until they are dropped, so look
        after every `finish` and `updated`.

        A running group counts from its start only if trajectories are the unit: its tokens may be younger.
        """
        known = self._ready | (self._running if self.bound.unit is StalenessUnit.TRAJECTORY else {})
        return sorted(group for group, born in known.items() if self.version - born > self.bound.max_staleness)

    def take(self) -> list[int] | None:
        """Returns the groups of the next update, the oldest that are ready; None while it has to wait for more. They
        are in training from then on.

        Raises:
            ValueError: an update is under way.
        """
        if self._training:
            raise ValueError("The next batch was asked for during an update.")
        late = set(self.stale())
        oldest = sorted((born, group) for group, born in self._ready.items() if group not in late)
        chosen = [group for _, group in oldest[: self.bound.groups]]
        if len(chosen) < self.bound.groups or (self.bound.policy is StalePolicy.WAIT and self._overtakes(set(chosen))):
            return None
        for group in chosen:
            del self._ready[group]
        self._training = tuple(chosen)
        return sorted(chosen)

    def updated(self) -> None:
        """The update is finished and its weights sample from now on."""
        self.trained += len(self._training)
        self._training = ()
        self.version += 1

    def _overtakes(self, chosen: set[int]) -> bool:
        """Returns whether some group left behind could then only be trained too late, however the next updates choose.

        Deadlines can be met exactly if for each coming update no more groups are due by then than all updates until
        then can take (earliest deadline first).
        """
        left = [born for group, born in (self._running | self._ready).items() if group not in chosen]
        due = sorted(born + self.bound.max_staleness - self.version for born in left)
        return any(count > updates * self.bound.groups for count, updates in enumerate(due, start=1))
