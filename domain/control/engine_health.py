"""The health of several rollout engines, and who of them gets the next request, as pure state machines: no clock, no
thread, no I/O.

Times are seconds of any clock that does not go back; engines are numbered from 0. Invariants: an engine that serves
has the current weights; deaths = restarts + engines that are dead now; an engine never starts again more often than
`max_restarts`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import StrEnum

from attrs import define, field, frozen, validators

RECENT = 65536
"""Keys remembered: a few megabytes."""


class EngineState(StrEnum):
    """What is known of an engine."""

    HEALTHY = "healthy"
    """It answers and has the current weights: it serves."""
    SUSPECT = "suspect"
    """It has been silent for a while: it gets no new requests and keeps those it has."""
    STALE = "stale"
    """It answers, but lacks the current weights: it gets no requests."""
    DEAD = "dead"
    """It is given up; its requests are others' now."""
    RESTARTING = "restarting"
    """Its replacement is on the way."""


class Death(StrEnum):
    """Why an engine was given up."""

    SILENT = "silent"
    """It did not answer in time."""
    FAILED = "failed"
    """It, or its process, failed at what it was asked."""
    WEIGHTS = "weights"
    """It failed to take weights."""
    START = "start"
    """Its replacement did not start."""


ALIVE = frozenset({EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE})
"""States of engines that can be talked to."""


@frozen(kw_only=True)
class FleetBounds:
    """`suspect_after`, `dead_after`: seconds of silence. `max_restarts`: of each engine, over the whole run."""

    suspect_after: float = field(default=10.0, validator=validators.gt(0.0))
    dead_after: float = field(default=60.0, validator=validators.gt(0.0))
    max_restarts: int = field(default=3, validator=validators.ge(0))


@define
class _Engine:
    state: EngineState = EngineState.HEALTHY
    heard: float = 0.0
    """When it answered last."""
    restarts: int = 0


@define
class FleetHealth:
    """Hears what happens to `size` engines, which are healthy at time `began`, and says which of them may serve.

    Every method raises ValueError if its event cannot happen in the engine's state, or there is no such engine.
    """

    bounds: FleetBounds
    size: int
    began: float = 0.0
    version: int | None = field(default=None, init=False)
    """Of the current weights; None while they are those that engines start with."""
    deaths: Counter[Death] = field(factory=Counter, init=False)
    last_reason: str = field(default="", init=False)
    """Of the latest death, in words."""
    states: Counter[EngineState] = field(factory=Counter, init=False)
    """Engines in each state."""
    _engines: list[_Engine] = field(init=False)
    _lost: int = field(default=0, init=False)
    """Dead engines that have no restart left."""

    def __attrs_post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"A fleet has at least one engine, not {self.size}.")
        self._engines = [_Engine(heard=self.began) for _ in range(self.size)]
        self.states[EngineState.HEALTHY] = self.size

    def state(self, engine: int) -> EngineState:
        """Returns the state of an engine."""
        return self._engine(engine).state

    def alive(self, engine: int) -> bool:
        """Returns whether an engine can be talked to."""
        return self.state(engine) in ALIVE

    def serves(self, engine: int) -> bool:
        """Returns whether an engine may be given requests."""
        return self.state(engine) is EngineState.HEALTHY

    @property
    def serving(self) -> list[int]:
        """Engines that may be given requests."""
        return [number for number, engine in enumerate(self._engines) if engine.state is EngineState.HEALTHY]

    @property
    def living(self) -> list[int]:
        """Engines that can be talked to."""
        return [number for number, engine in enumerate(self._engines) if engine.state in ALIVE]

    @property
    def to_restart(self) -> list[int]:
        """Dead engines that may start again."""
        if not self.states[EngineState.DEAD]:
            return []
        return [number for number in range(self.size) if self.restartable(number)]

    def restartable(self, engine: int) -> bool:
        """Returns whether an engine is dead and may start again."""
        one = self._engine(engine)
        return one.state is EngineState.DEAD and one.restarts < self.bounds.max_restarts

    def restarts(self, engine: int) -> int:
        """Returns how often an engine has been restarted."""
        return self._engine(engine).restarts

    @property
    def failure(self) -> str | None:
        """Why no engine will ever serve again, in one sentence; None while there is hope."""
        if self._lost < self.size:
            return None
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.deaths.items()))
        return (
            f"All {self.size} engines are dead, each after {self.bounds.max_restarts} restarts, which is the most "
            f"(deaths: {kinds}; the last reason: {self.last_reason}): look into the engines' logs."
        )

    def summary(self) -> str:
        """Returns how many engines are in which state."""
        return ", ".join(f"{self.states[state]} {state}" for state in EngineState if self.states[state])

    def answered(self, engine: int, now: float) -> None:
        """A living engine answered something."""
        one = self._require(engine, ALIVE, "answer")
        one.heard = max(one.heard, now)
        if one.state is EngineState.SUSPECT:
            self._move(one, EngineState.HEALTHY)

    def silence(self, engine: int, now: float) -> float:
        """Returns seconds since an engine answered last."""
        return now - self._engine(engine).heard

    def tick(self, now: float) -> list[int]:
        """Time has passed; returns the engines that have died of silence."""
        died = []
        for number, one in enumerate(self._engines):
            silence = now - one.heard
            if one.state in ALIVE and silence > self.bounds.dead_after:
                self.died(number, Death.SILENT, f"engine {number} has not answered for {silence:.0f} s")
                died.append(number)
            elif one.state is EngineState.HEALTHY and silence > self.bounds.suspect_after:
                self._move(one, EngineState.SUSPECT)
        return died

    def died(self, engine: int, kind: Death, reason: str) -> None:
        """A living engine, or one on its way, is given up."""
        one = self._require(engine, {*ALIVE, EngineState.RESTARTING}, "die")
        self._move(one, EngineState.DEAD)
        self.deaths[kind] += 1
        self.last_reason = reason
        self._lost += one.restarts >= self.bounds.max_restarts

    def restarting(self, engine: int) -> None:
        """A dead engine is started again."""
        one = self._require(engine, {EngineState.DEAD}, "be restarted")
        if not self.restartable(engine):
            raise ValueError(f"Engine {engine} has had its {one.restarts} restarts and cannot be restarted.")
        one.restarts += 1
        self._move(one, EngineState.RESTARTING)

    def restarted(self, engine: int, now: float) -> None:
        """It runs, with the weights that engines start with."""
        one = self._require(engine, {EngineState.RESTARTING}, "have restarted")
        one.heard = now
        self._move(one, EngineState.HEALTHY if self.version is None else EngineState.STALE)

    def weights(self, version: int) -> None:
        """There are new weights, which no engine has yet; the same version again means that it is sent again."""
        if self.version is not None and version < self.version:
            raise ValueError(f"Version {version} cannot follow {self.version}: versions only grow.")
        self.version = version
        for one in self._engines:
            if one.state in ALIVE:
                self._move(one, EngineState.STALE)

    def took(self, engine: int, version: int, now: float) -> None:
        """A living engine has taken the current weights."""
        one = self._require(engine, ALIVE, "take weights")
        if version != self.version:
            raise ValueError(f"Engine {engine} took version {version}, but the current one is {self.version}.")
        one.heard = max(one.heard, now)
        self._move(one, EngineState.HEALTHY)

    def _engine(self, engine: int) -> _Engine:
        if not 0 <= engine < self.size:
            raise ValueError(f"There is no engine {engine} among {self.size}.")
        return self._engines[engine]

    def _require(self, engine: int, states: Iterable[EngineState], event: str) -> _Engine:
        one = self._engine(engine)
        if one.state not in states:
            raise ValueError(f"Engine {engine} is {one.state} and cannot {event}.")
        return one

    def _move(self, one: _Engine, state: EngineState) -> None:
        self.states[one.state] -= 1
        self.states[state] += 1
        one.state = state


@define
class LeastLoaded:
    """Counts the requests of `size` engines and names the one on offer that has the fewest; every call takes constant
    time on average."""

    size: int
    _loads: list[int] = field(init=False)
    _on_offer: dict[int, dict[int, None]] = field(factory=dict, init=False)
    """Requests: the engines on offer that have so many, those that came to it first in front."""
    _offers: set[int] = field(factory=set, init=False)
    _least: int = field(default=0, init=False)
    """No engine on offer has fewer."""

    def __attrs_post_init__(self) -> None:
        self._loads = [0] * self.size

    @property
    def total(self) -> int:
        """Requests of all engines."""
        return sum(self._loads)

    def load(self, engine: int) -> int:
        """Requests of an engine."""
        return self._loads[engine]

    def offer(self, engine: int, offered: bool) -> None:
        """Whether an engine takes requests from now on; it counts those that it has in any case."""
        if offered and engine not in self._offers:
            self._offers.add(engine)
            self._enter(engine)
        elif not offered and engine in self._offers:
            self._leave(engine)
            self._offers.discard(engine)

    def acquire(self, preferred: int | None = None) -> int | None:
        """Gives a request to an engine on offer with the fewest, `preferred` among equals; None if none is on offer."""
        if not self._offers:
            return None
        while self._least not in self._on_offer:
            self._least += 1
        equals = self._on_offer[self._least]
        engine = preferred if preferred is not None and preferred in equals else next(iter(equals))
        self._change(engine, 1)
        return engine

    def release(self, engine: int) -> None:
        """A request of an engine has ended."""
        self._change(engine, -1)

    def _change(self, engine: int, by: int) -> None:
        offered = engine in self._offers
        if offered:
            self._leave(engine)
        self._loads[engine] += by
        if offered:
            self._enter(engine)

    def _enter(self, engine: int) -> None:
        load = self._loads[engine]
        self._on_offer.setdefault(load, {})[engine] = None
        self._least = min(self._least, load)

    def _leave(self, engine: int) -> None:
        equals = self._on_offer[self._loads[engine]]
        del equals[engine]
        if not equals:
            del self._on_offer[self._loads[engine]]


@define
class Recent:
    """The engine that each of the `RECENT` latest keys went to."""

    _engines: OrderedDict[int, int] = field(factory=OrderedDict, init=False)

    def get(self, key: int) -> int | None:
        """Returns the engine of a key, if it is remembered."""
        return self._engines.get(key)

    def put(self, key: int, engine: int) -> None:
        """A key goes to an engine."""
        self._engines[key] = engine
        self._engines.move_to_end(key)
        if len(self._engines) > RECENT:
            self._engines.popitem(last=False)
