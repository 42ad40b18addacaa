"""The health of several rollout engines, and the choice of the engine for the next request, as pure state machines: no
clock, no thread, no I/O.

Times are seconds of any clock that does not go back; engines are numbered from 0. Invariants: an engine that serves
has the current weights; deaths = restarts + engines that are dead now; an engine starts again `max_restarts` times at
most without having lived for `healed_after` in between.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import StrEnum

from attrs import define, field, frozen, validators

RECENT = 65536
"""Number of keys that are remembered, which take a few megabytes."""


class EngineState(StrEnum):
    """State of an engine."""

    HEALTHY = "healthy"
    """It answers and has the current weights: it serves."""
    SUSPECT = "suspect"
    """It has been silent for a while: it gets no new requests and keeps those it has."""
    STALE = "stale"
    """It answers, but lacks the current weights: it gets no requests."""
    DEAD = "dead"
    """It is given up; other engines have its requests."""
    RESTARTING = "restarting"
    """Its replacement is starting."""


class Death(StrEnum):
    """Kind of reason why an engine was given up."""

    SILENT = "silent"
    """It did not answer in time."""
    FAILED = "failed"
    """It, or its process, failed at what it was asked."""
    WEIGHTS = "weights"
    """It failed to take weights."""
    START = "start"
    """It, or its replacement, did not start."""


NEAR_SHARE, NEAR_REQUESTS = 1.5, 8
"""With n requests at the engine that has the fewest, a request goes to the engine that has computed its beginning if
that one has at most NEAR_SHARE * n + NEAR_REQUESTS. An engine decodes a few more sequences in almost the same time,
while another one would have to compute all of the earlier turns again."""

ALIVE = frozenset({EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE})
"""States of engines that can be talked to."""


@frozen(kw_only=True)
class FleetBounds:
    """Bounds of a fleet."""

    suspect_after: float = field(default=10.0, validator=validators.gt(0.0))
    """Seconds of silence after which an engine is suspected."""
    dead_after: float = field(default=60.0, validator=validators.gt(0.0))
    """Seconds of silence after which it counts as dead."""
    max_restarts: int = field(default=3, validator=validators.ge(0))
    """Restarts of each engine, without those before it lived for `healed_after`: a server that runs for months loses an
    engine now and then, but one that cannot run dies again and again."""
    healed_after: float = field(default=3600.0, validator=validators.gt(0.0))
    """Seconds after which its restarts are forgotten."""


@define
class _Engine:
    state: EngineState = EngineState.HEALTHY
    heard: float = 0.0
    """Time of its last answer."""
    restarts: int = 0
    started: float = 0.0
    """Time of its latest start."""
    spent: int = 0
    """Restarts that count."""


@define
class FleetHealth:
    """Records events of `size` engines, which are healthy at time `began`, and decides which of them may serve.

    Every method raises ValueError if its event cannot happen in the engine's state, or there is no such engine.
    """

    bounds: FleetBounds
    size: int
    began: float = 0.0
    version: int | None = field(default=None, init=False)
    """Version of the current weights; None while they are those that engines start with."""
    deaths: Counter[Death] = field(factory=Counter, init=False)
    last_reason: str = field(default="", init=False)
    """Reason for the latest death."""
    states: Counter[EngineState] = field(factory=Counter, init=False)
    """Number of engines in each state."""
    _engines: list[_Engine] = field(init=False)
    _lost: int = field(default=0, init=False)
    """Number of dead engines that have no restart left."""

    def __attrs_post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"A fleet has at least one engine, not {self.size}.")
        self._engines = [_Engine(heard=self.began, started=self.began) for _ in range(self.size)]
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
        return one.state is EngineState.DEAD and one.spent < self.bounds.max_restarts

    def restarts(self, engine: int) -> int:
        """Returns how often an engine has been restarted."""
        return self._engine(engine).restarts

    @property
    def failure(self) -> str | None:
        """Sentence that says why no engine will ever serve again; None if one may."""
        if self._lost < self.size:
            return None
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.deaths.items()))
        return (
            f"All {self.size} engines are dead, each after {self.bounds.max_restarts} restarts, which is the most "
            f"(deaths: {kinds}; the last reason: {self.last_reason}): look into the engines' logs."
        )

    def summary(self) -> str:
        """Returns the number of engines in each state, as text."""
        return ", ".join(f"{self.states[state]} {state}" for state in EngineState if self.states[state])

    def answered(self, engine: int, now: float) -> None:
        """Records an answer of a living engine."""
        one = self._require(engine, ALIVE, "answer")
        one.heard = max(one.heard, now)
        if one.state is EngineState.SUSPECT:
            self._move(one, EngineState.HEALTHY)

    def silence(self, engine: int, now: float) -> float:
        """Returns the seconds since an engine's last answer."""
        return now - self._engine(engine).heard

    def tick(self, now: float) -> list[int]:
        """Updates states for time `now`; returns the engines that died because of silence."""
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
        """Records that a living or starting engine is given up."""
        one = self._require(engine, {*ALIVE, EngineState.RESTARTING}, "die")
        if one.state in ALIVE and one.heard - one.started >= self.bounds.healed_after:
            one.spent = 0
        self._move(one, EngineState.DEAD)
        self.deaths[kind] += 1
        self.last_reason = reason
        self._lost += one.spent >= self.bounds.max_restarts

    def restarting(self, engine: int) -> None:
        """Records that a dead engine is being started again."""
        one = self._require(engine, {EngineState.DEAD}, "be restarted")
        if not self.restartable(engine):
            raise ValueError(f"Engine {engine} has had its {one.spent} restarts and cannot be restarted.")
        one.restarts += 1
        one.spent += 1
        self._move(one, EngineState.RESTARTING)

    def restarted(self, engine: int, now: float) -> None:
        """Records that an engine runs again, with the weights that engines start with."""
        one = self._require(engine, {EngineState.RESTARTING}, "have restarted")
        one.heard = one.started = now
        self._move(one, EngineState.HEALTHY if self.version is None else EngineState.STALE)

    def weights(self, version: int) -> None:
        """Records that there are new weights, which no engine has yet; the same version again means that it is sent
        again."""
        if self.version is not None and version < self.version:
            raise ValueError(f"Version {version} cannot follow {self.version}: versions only grow.")
        self.version = version
        for one in self._engines:
            if one.state in ALIVE:
                self._move(one, EngineState.STALE)

    def took(self, engine: int, version: int, now: float) -> None:
        """Records that a living engine has the current weights."""
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
    """Counts the requests of `size` engines and finds the available one with the fewest, in constant time on
    average."""

    size: int
    _loads: list[int] = field(init=False)
    _on_offer: dict[int, dict[int, None]] = field(factory=dict, init=False)
    """Available engines by number of requests, oldest first."""
    _offers: set[int] = field(factory=set, init=False)
    _least: int = field(default=0, init=False)
    """Lower bound of the available engines' requests."""

    def __attrs_post_init__(self) -> None:
        self._loads = [0] * self.size

    def offer(self, engine: int, offered: bool) -> None:
        """Sets whether an engine takes requests from now on; the requests that it has count in any case."""
        if offered and engine not in self._offers:
            self._offers.add(engine)
            self._enter(engine)
        elif not offered and engine in self._offers:
            self._leave(engine)
            self._offers.discard(engine)

    def acquire(self, preferred: int | None = None, *, near: bool = False) -> int | None:
        """Gives a request to an available engine with the fewest, `preferred` among equals; returns it, None without
        any. `near`: `preferred` has computed the beginning of the request, and so gets it even if it has a few requests
        more."""
        if not self._offers:
            return None
        while self._least not in self._on_offer:
            self._least += 1
        engine = preferred
        most = NEAR_SHARE * self._least + NEAR_REQUESTS if near else self._least
        if engine not in self._offers or self._loads[engine] > most:
            engine = next(iter(self._on_offer[self._least]))
        self._change(engine, 1)
        return engine

    def release(self, engine: int) -> None:
        """Records the end of an engine's request."""
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
        """Records the engine of a key."""
        self._engines[key] = engine
        self._engines.move_to_end(key)
        if len(self._engines) > RECENT:
            self._engines.popitem(last=False)
