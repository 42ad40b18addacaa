"""The groups that an asynchronous run may start and train on, as a pure state machine: no clock, no thread, no I/O.

The policy's version is the number of finished updates. The lag of a token, or of a whole trajectory, is the version
that trains on it minus the version that sampled its beginning. Nothing with a lag above `max_staleness` is ever trained
on.

Invariants:

- At most (max_staleness + 1) x groups of an update are started and not yet trained on. This is the capacity rule of
  AReaL (Fu et al. 2025, section 4.1), by which every group that is started can be trained on in time.
- submitted = trained + dropped by reason + in flight.
- Under `wait` no batch is taken that would make a group left behind too old.
- There always is a next batch, as long as running groups finish and the groups that `stale` returns are dropped.

Example with 2 groups an update and max_staleness 1: groups 0 to 3 start under version 0. When 1 and 2 are ready, they
are trained on: 0 and 3 have lag 1 in the next update, which has room for both. Now 4 and 5 start under version 1. If 3
and 4 are ready next, `wait` does not take them: group 0 would have lag 2 in the update after that. The batch waits for
group 0 and is made of 0 and 3; `drop` would take 3 and 4, and drop group 0.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from attrs import define, field, frozen

STALE = "stale"
"""Reason for dropping a group that became too old."""


class StalenessUnit(StrEnum):
    """Beginning of a group's age."""

    TRAJECTORY = "trajectory"
    """The version when the group was started."""
    TOKEN = "token"
    """The version of its oldest sampled token, which is known when the group is finished."""


class StalePolicy(StrEnum):
    """Treatment of a slow group that would become too old."""

    WAIT = "wait"
    """Training waits for it: nothing is lost."""
    DROP = "drop"
    """Training goes on without it, and it is dropped."""


@frozen(kw_only=True)
class StalenessBound:
    """Bound on staleness."""

    groups: int
    """Groups that an update trains on."""
    updates: int
    """Updates of the run."""
    max_staleness: int = 1
    """Largest lag that is trained on, in policy versions."""
    unit: StalenessUnit = StalenessUnit.TRAJECTORY
    policy: StalePolicy = StalePolicy.WAIT


@define
class StalenessGate:
    """Records what happens to groups, by their ids, and decides what may happen next.

    A group is running from `start` to `finish`, then ready until `take`, then in training until `updated`. `drop` ends
    it earlier.
    """

    bound: StalenessBound
    version: int = 0
    """Finished updates."""
    trained: int = 0
    """Groups in finished updates."""
    dropped: Counter[str] = field(factory=Counter)
    """Groups that were not trained on, by reason."""
    _running: dict[int, int] = field(factory=dict)
    """Version under which each running group was started."""
    _ready: dict[int, int] = field(factory=dict)
    """Version from which the age of each ready group is counted."""
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
        """Records the start of a group.

        Raises:
            ValueError: there is no room for it, or it is in flight already.
        """
        if self.room == 0 or group in self._running or group in self._ready or group in self._training:
            raise ValueError(f"Group {group} cannot be started: {self.in_flight} are in flight, with room {self.room}.")
        self._running[group] = self.version
        self._submitted += 1

    def finish(self, group: int, oldest_version: int) -> None:
        """Records that a running group is ready; its oldest token was sampled under `oldest_version`."""
        started = self._running.pop(group)
        self._ready[group] = oldest_version if self.bound.unit is StalenessUnit.TOKEN else started

    def drop(self, group: int, reason: str) -> None:
        """Records that a running or ready group will not be trained on.

        Raises:
            ValueError: the group is neither.
        """
        if self._running.pop(group, None) is None and self._ready.pop(group, None) is None:
            raise ValueError(f"Group {group} is neither running nor ready, so it cannot be dropped.")
        self.dropped[reason] += 1

    def stale(self) -> list[int]:
        """Returns the groups that can no longer be trained on; none under `wait`. They take up room until they are
        dropped, so call this after every `finish` and `updated`.

        With tokens as the unit a running group is never among them: its tokens may be younger than its start.
        """
        known = self._ready | (self._running if self.bound.unit is StalenessUnit.TRAJECTORY else {})
        return sorted(group for group, born in known.items() if self.version - born > self.bound.max_staleness)

    def take(self) -> list[int] | None:
        """Returns the groups of the next update, the oldest that are ready, which are then in training; None while the
        update has to wait.

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

    def updated(self) -> tuple[int, ...]:
        """Records that the update is finished, whose weights sample from now on; returns the groups that it trained
        on."""
        trained, self._training = self._training, ()
        self.trained += len(trained)
        self.version += 1
        return trained

    def _overtakes(self, chosen: set[int]) -> bool:
        """Returns whether taking `chosen` would make some other group too old, however the next updates choose.

        A group is due by update `born + max_staleness`. All deadlines can be met if and only if, for each coming
        update, the groups due by then are no more than the updates until then can take (earliest deadline first).
        """
        left = [born for group, born in (self._running | self._ready).items() if group not in chosen]
        due = sorted(born + self.bound.max_staleness - self.version for born in left)
        return any(count > updates * self.bound.groups for count, updates in enumerate(due, start=1))
