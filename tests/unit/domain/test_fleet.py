"""The health of a fleet under random events, against a model that is written differently; and who gets a request."""

import random
from collections import Counter
from contextlib import suppress

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain.control.engine_health import (
    ALIVE,
    NEAR_REQUESTS,
    NEAR_SHARE,
    RECENT,
    Death,
    EngineState,
    FleetBounds,
    FleetHealth,
    LeastLoaded,
    Recent,
)

BOUNDS = st.builds(
    FleetBounds,
    suspect_after=st.sampled_from([1.0, 5.0, 20.0]),
    dead_after=st.sampled_from([2.0, 10.0, 30.0]),
    max_restarts=st.integers(0, 3),
    healed_after=st.sampled_from([5.0, 30.0, 1000.0]),
)


@define
class World:
    """Engines as they really are: which weights each holds, whether a process of it runs, when it spoke last."""

    health: FleetHealth
    chance: random.Random
    now: float = 0.0
    pushed: int | None = None
    holds: list[int | None] = field(init=False)
    runs: list[bool] = field(init=False)
    heard: list[float] = field(init=False)
    began: list[float] = field(init=False)
    starts: Counter[int] = field(factory=Counter)
    counted: Counter[int] = field(factory=Counter)
    """Starts since the last life that was long enough."""
    deaths: int = 0

    def __attrs_post_init__(self) -> None:
        size = self.health.size
        self.holds, self.runs, self.heard, self.began = [None] * size, [True] * size, [0.0] * size, [0.0] * size

    def engine(self) -> int:
        return self.chance.randrange(self.health.size)

    def answer(self) -> None:
        engine = self.engine()
        self.health.answered(engine, self.now)
        self.heard[engine] = self.now

    def time_passes(self) -> None:
        self.now += self.chance.choice([0.5, 2.0, 11.0])
        bounds = self.health.bounds
        due = [
            e for e in range(self.health.size) if self.health.alive(e) and self.now - self.heard[e] > bounds.dead_after
        ]
        assert self.health.tick(self.now) == due
        for engine in due:
            self.end(engine)
        for engine in self.health.serving:
            assert self.now - self.heard[engine] <= bounds.suspect_after

    def die(self) -> None:
        engine = self.engine()
        self.health.died(engine, self.chance.choice(list(Death)), "a reason")
        self.end(engine)

    def end(self, engine: int) -> None:
        if self.runs[engine] and self.heard[engine] >= self.began[engine] + self.health.bounds.healed_after:
            self.counted[engine] = 0
        self.runs[engine] = False
        self.deaths += 1

    def start(self) -> None:
        engine = self.engine()
        self.health.restarting(engine)
        self.starts[engine] += 1
        self.counted[engine] += 1

    def started(self) -> None:
        engine = self.engine()
        self.health.restarted(engine, self.now)
        self.runs[engine], self.holds[engine] = True, None
        self.heard[engine] = self.began[engine] = self.now

    def push(self) -> None:
        version = self.chance.randint(0, 3) + (self.pushed or 0) - self.chance.randint(0, 1)
        self.health.weights(version)
        self.pushed = version
        self.holds = [None] * self.health.size  # sent again, the same version may be other weights

    def take(self) -> None:
        engine = self.engine()
        version = self.chance.choice([self.pushed, 0, 1])
        if version is None:
            return
        self.health.took(engine, version, self.now)
        self.holds[engine], self.heard[engine] = version, self.now

    def check(self) -> None:
        health = self.health
        for engine in range(health.size):
            state = health.state(engine)
            assert self.runs[engine] == (state in ALIVE)
            if health.serves(engine):
                assert self.holds[engine] == self.pushed == health.version
            assert health.restarts(engine) == self.starts[engine]
            assert self.counted[engine] <= health.bounds.max_restarts
            assert health.silence(engine, self.now) == self.now - self.heard[engine]
        states = Counter(map(health.state, range(health.size)))
        assert +health.states == states
        assert health.deaths.total() == self.deaths == self.starts.total() + states[EngineState.DEAD]
        assert set(health.serving) <= set(health.living)
        exhausted = all(
            health.state(e) is EngineState.DEAD and self.counted[e] == health.bounds.max_restarts
            for e in range(health.size)
        )
        assert (health.failure is not None) == exhausted


@settings(max_examples=300, deadline=None)
@given(BOUNDS, st.integers(1, 4), st.integers(0, 2**32))
def test_any_order_of_events_is_legal_or_refused_and_changes_nothing(bounds: FleetBounds, size: int, seed: int) -> None:
    world = World(FleetHealth(bounds, size), random.Random(seed))
    events = [
        world.answer,
        world.time_passes,
        world.die,
        world.start,
        world.started,
        world.push,
        world.take,
        world.take,
    ]
    for _ in range(120):
        with suppress(ValueError):
            world.chance.choice(events)()
        world.check()
        for engine in world.health.to_restart:
            assert world.health.restartable(engine)


def fleet(size: int = 2, **bounds: float) -> FleetHealth:
    return FleetHealth(FleetBounds(**bounds), size)  # type: ignore[arg-type]


def test_silence_makes_suspect_then_dead_and_an_answer_heals() -> None:
    health = fleet(suspect_after=10, dead_after=30)
    assert health.tick(11) == []
    assert (health.serving, health.living) == ([], [0, 1])
    health.answered(1, 11)
    assert health.serving == [1]
    assert health.tick(31) == [0]
    assert health.state(1) is EngineState.SUSPECT
    assert health.deaths == {Death.SILENT: 1}
    assert health.last_reason == "engine 0 has not answered for 31 s"


def test_an_answer_that_comes_late_makes_no_engine_silent_for_longer() -> None:
    health = FleetHealth(FleetBounds(), 1)
    health.answered(0, 9)
    health.answered(0, 4)
    assert health.silence(0, 10) == 1


def test_a_replacement_serves_once_it_has_the_current_weights() -> None:
    health = fleet()
    health.died(0, Death.FAILED, "it was killed")
    health.restarting(0)
    health.restarted(0, 5)
    assert health.serves(0), "nothing was pushed, so it has what the others have"
    health.weights(1)
    assert health.serving == []
    health.took(1, 1, 6)
    health.died(0, Death.FAILED, "it was killed")
    health.restarting(0)
    health.restarted(0, 7)
    assert health.state(0) is EngineState.STALE
    health.answered(0, 8)
    assert health.serving == [1]
    health.weights(2)
    with pytest.raises(ValueError, match="took version 1, but the current one is 2"):
        health.took(0, 1, 9)
    health.took(0, 2, 9)
    assert health.serving == [0]


def test_when_no_restart_is_left_the_reason_is_one_sentence() -> None:
    health = fleet(max_restarts=1)
    for engine in (0, 1):
        health.died(engine, Death.FAILED, "it was killed")
        health.restarting(engine)
        assert health.failure is None
        health.died(engine, Death.START, "no GPU is free")
    assert health.to_restart == []
    assert health.failure == (
        "All 2 engines are dead, each after 1 restarts, which is the most (deaths: 2 failed, 2 start; the last reason: "
        "no GPU is free): look into the engines' logs."
    )
    with pytest.raises(ValueError, match="has had its 1 restarts"):
        health.restarting(0)


def test_restarts_count_no_more_after_a_long_life() -> None:
    health = fleet(1, max_restarts=1, healed_after=100)
    for life in range(3):
        began = 1000 * life
        health.answered(0, began + 100)
        health.died(0, Death.FAILED, "it was killed")
        health.restarting(0)
        health.restarted(0, began + 1000)
    assert health.restarts(0) == 3
    health.answered(0, 3099)
    health.died(0, Death.FAILED, "it was killed again")
    assert health.to_restart == []
    assert health.failure is not None


def test_a_long_life_does_not_count_for_replacements_that_never_start() -> None:
    health = fleet(1, max_restarts=2, healed_after=100)
    health.answered(0, 500)
    health.died(0, Death.FAILED, "it was killed")
    for _ in range(2):
        health.restarting(0)
        health.died(0, Death.START, "no GPU is free")
    assert health.to_restart == []


def test_what_cannot_be_is_refused() -> None:
    health = fleet()
    for impossible, message in (
        (lambda: health.restarting(0), "healthy and cannot be restarted"),
        (lambda: health.restarted(0, 1), "cannot have restarted"),
        (lambda: health.answered(2, 1), "no engine 2 among 2"),
        (lambda: health.took(0, 1, 1), "the current one is None"),
        (lambda: fleet(0), "at least one engine"),
    ):
        with pytest.raises(ValueError, match=message):
            impossible()
    health.weights(3)
    with pytest.raises(ValueError, match="versions only grow"):
        health.weights(2)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_the_least_loaded_on_offer_is_chosen(size: int, seed: int) -> None:
    chance = random.Random(seed)
    machine = LeastLoaded(size)
    loads, offered = [0] * size, set[int]()
    for _ in range(150):
        engine = chance.randrange(size)
        event = chance.choice(["offer", "withdraw", "acquire", "near", "near", "release"])
        if event in ("acquire", "near"):
            chosen = machine.acquire(engine, near=event == "near")
            if not offered:
                assert chosen is None
                continue
            least = min(loads[e] for e in offered)
            assert chosen in offered
            bound = least * NEAR_SHARE + NEAR_REQUESTS if event == "near" else least
            preferred = engine in offered and loads[engine] <= bound
            assert (chosen == engine) if preferred else (loads[chosen] == least)
            loads[chosen] += 1
        elif event == "release":
            if loads[engine]:
                machine.release(engine)
                loads[engine] -= 1
        else:
            machine.offer(engine, event == "offer")
            (offered.add if event == "offer" else offered.discard)(engine)
        assert machine._loads == loads


def test_the_latest_keys_are_remembered() -> None:
    recent = Recent()
    for key in range(RECENT):
        recent.put(key, key % 7)
    recent.put(0, 5)
    recent.put(RECENT, 1)
    assert (recent.get(0), recent.get(1), recent.get(2), recent.get(RECENT)) == (5, None, 2, 1)
