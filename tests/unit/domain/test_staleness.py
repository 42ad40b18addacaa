"""The gate of asynchronous runs under random events: the bound, conservation, and that there always is a next batch."""

import random

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain.control.staleness import STALE, StalenessBound, StalenessGate, StalenessUnit, StalePolicy

BOUNDS = st.builds(
    StalenessBound,
    groups=st.integers(1, 4),
    updates=st.integers(1, 8),
    max_staleness=st.integers(0, 4),
    unit=st.sampled_from(StalenessUnit),
    policy=st.sampled_from(StalePolicy),
)


@define
class World:
    """A run whose order of events is drawn at random; every one of them is checked."""

    gate: StalenessGate
    chance: random.Random
    started: dict[int, int] = field(factory=dict)
    """Version at the start of each group that is running."""
    born: dict[int, tuple[int, int]] = field(factory=dict)
    """(start, oldest token) of each group that was ready."""
    trained: list[int] = field(factory=list)
    next_group: int = 0

    def check(self) -> None:
        gate, bound = self.gate, self.gate.bound
        assert gate.submitted == gate.trained + gate.dropped.total() + gate.in_flight == self.next_group
        assert gate.in_flight <= (bound.max_staleness + 1) * bound.groups
        assert gate.trained + gate.in_flight <= bound.updates * bound.groups
        assert 0 <= gate.running <= gate.in_flight

    def start(self) -> None:
        for _ in range(self.chance.randint(0, self.gate.room)):
            self.gate.start(self.next_group)
            self.started[self.next_group] = self.gate.version
            self.next_group += 1
            self.check()

    def end_one(self) -> None:
        """Some running group is finished or rejected."""
        if not self.started:
            return
        group = self.chance.choice(sorted(self.started))
        start = self.started.pop(group)
        if self.chance.random() < 0.2:
            self.gate.drop(group, "too_easy")
        else:
            oldest = self.chance.randint(start, self.gate.version)
            self.gate.finish(group, oldest)
            self.born[group] = (start, oldest)
            self.drop_stale()
        self.check()

    def drop_stale(self) -> None:
        for group in self.gate.stale():
            self.gate.drop(group, STALE)
            self.started.pop(group, None)
            self.check()

    def update(self) -> bool:
        """Returns whether there was a batch; groups may start and end while it is trained on."""
        gate, bound = self.gate, self.gate.bound
        batch = gate.take()
        if batch is None:
            return False
        assert len(batch) == bound.groups
        for group in batch:
            start, oldest = self.born[group]
            age = gate.version - (start if bound.unit is StalenessUnit.TRAJECTORY else oldest)
            assert 0 <= age <= bound.max_staleness
        self.check()
        for _ in range(self.chance.randint(0, 3)):
            self.start()
            self.end_one()
        gate.updated()
        self.trained += batch
        self.check()
        self.drop_stale()
        return True


@settings(max_examples=300, deadline=None)
@given(BOUNDS, st.integers(0, 2**32))
def test_any_order_of_events_stays_within_the_bound_and_comes_to_its_end(bound: StalenessBound, seed: int) -> None:
    world = World(StalenessGate(bound), random.Random(seed))
    for _ in range(100_000):
        if world.gate.version == bound.updates:
            break
        world.chance.choice([world.start, world.end_one, world.end_one, world.update])()
    assert world.gate.version == bound.updates, "the run came to a halt"
    assert len(world.trained) == len(set(world.trained)) == bound.updates * bound.groups == world.gate.trained
    assert world.gate.in_flight == 0, "nothing was played for nothing at the end"
    if bound.policy is StalePolicy.WAIT or bound.max_staleness == 0:
        assert world.gate.dropped[STALE] == 0


@settings(max_examples=200, deadline=None)
@given(BOUNDS, st.integers(0, 2**32))
def test_when_all_groups_have_ended_there_is_a_batch_or_room(bound: StalenessBound, seed: int) -> None:
    world = World(StalenessGate(bound), random.Random(seed))
    while world.gate.version < bound.updates:
        for _ in range(world.chance.randint(0, 9)):
            world.chance.choice([world.start, world.end_one, world.update])()
        while world.started:
            world.end_one()
        if world.gate.version < bound.updates:
            world.drop_stale()
            assert world.update() or world.gate.room > 0


def gate(groups: int = 1, max_staleness: int = 2, updates: int = 9, **settings: str) -> StalenessGate:
    return StalenessGate(StalenessBound(groups=groups, max_staleness=max_staleness, updates=updates, **settings))  # type: ignore[arg-type]


def play(machine: StalenessGate, *groups: int) -> None:
    for group in groups:
        machine.start(group)


def test_a_bound_of_zero_takes_turns() -> None:
    machine = gate(groups=2, max_staleness=0)
    play(machine, 0, 1)
    assert machine.room == 0
    machine.finish(1, 0)
    assert machine.take() is None
    machine.finish(0, 0)
    assert machine.take() == [0, 1]
    assert machine.room == 0, "nothing starts while the update is under way"
    machine.updated()
    assert machine.room == 2


def test_waiting_lets_fast_groups_overtake_until_a_slow_one_is_due() -> None:
    machine = gate()
    play(machine, 0, 1, 2)  # all must be trained at version 2 at the latest
    machine.finish(2, 0)
    assert machine.take() == [2]
    machine.updated()
    play(machine, 3)
    machine.finish(3, 1)
    assert machine.take() is None, "groups 0 and 1 need the two updates that are left to them"
    machine.finish(1, 0)
    assert machine.take() == [1], "the oldest that are ready"
    machine.updated()
    assert machine.take() is None
    machine.finish(0, 0)
    assert machine.take() == [0]


def test_dropping_lets_the_slow_one_go() -> None:
    machine = gate(max_staleness=1, policy=StalePolicy.DROP)
    play(machine, 0, 1)
    for fast in (1, 2):
        machine.finish(fast, machine.version)
        assert machine.take() == [fast]
        machine.updated()
        play(machine, fast + 1)
    assert machine.stale() == [0]
    machine.drop(0, STALE)
    assert (machine.submitted, machine.trained, machine.dropped, machine.in_flight) == (4, 2, {STALE: 1}, 1)
    assert machine.room == 1


def test_the_age_of_tokens_is_known_at_the_end_only() -> None:
    machine = gate(max_staleness=1, policy=StalePolicy.DROP, unit=StalenessUnit.TOKEN)
    play(machine, 0, 1)
    for fast in (1, 2):
        machine.finish(fast, machine.version)
        machine.take()
        machine.updated()
        play(machine, fast + 1)
    assert machine.stale() == [], "it may have waited for its turn"
    machine.finish(0, 1)
    assert machine.stale() == []
    machine.finish(3, 0)
    assert machine.stale() == [3]
    assert machine.take() == [0]


def test_what_cannot_be_is_refused() -> None:
    machine = gate(max_staleness=0)
    machine.start(0)
    with pytest.raises(ValueError, match="cannot be started"):
        machine.start(1)
    with pytest.raises(ValueError, match="neither running nor ready"):
        machine.drop(5, STALE)
    machine.finish(0, 0)
    machine.take()
    with pytest.raises(ValueError, match="during an update"):
        machine.take()


def test_a_resumed_gate_counts_on() -> None:
    machine = StalenessGate.resumed(
        StalenessBound(groups=2, updates=5, max_staleness=1), version=4, trained=8, dropped={STALE: 3}
    )
    assert (machine.submitted, machine.in_flight) == (11, 0)
    assert machine.room == 2, "one update is left"
