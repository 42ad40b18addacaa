"""The members of a fleet: they are asked, watched by pings, given up when they die or are silent, and replaced.

Invariant: a call to a member ends with its answer, or as soon as the member is given up.
Does not own: which requests they get, and how a replacement gets the current weights (`fleet.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from rollgrad.application.engines.changes import Changes
from rollgrad.application.engines.fleet_member import (
    BackgroundTasks,
    FleetMember,
    GaveUpError,
    MemberCalls,
    end_member,
    engine_work,
)
from rollgrad.application.foreign import error_text
from rollgrad.domain.control.engine_health import Death, FleetBounds, FleetHealth, LeastLoaded
from rollgrad.domain.errors import EngineError

log = structlog.get_logger(__name__)

T = TypeVar("T")

LONGEST_ROUND = 2.0
"""Longest time between two rounds of pings that counts as the engines' silence, in multiples of `ping_seconds`; in any
longer time this process itself stood still."""


class WatchedMembers:
    """Watches members from the first `watch` on; `offer` says which of them serve at first.

    Args:
        members: the engines.
        bounds: bounds of silence and restarts.
        changes: are told when members begin or cease to serve.
        ping_seconds: seconds between rounds in which silent members are pinged, and dead ones replaced.
        call_seconds: longest that a member may take to answer a ping, and to close.
        restart_seconds: longest that a member may take to start again.
        asleep: whether dead members are left for later.
        restarted: called with the number of a member that has started again and lacks the current weights.
    """

    def __init__(
        self,
        members: Sequence[FleetMember],
        bounds: FleetBounds,
        changes: Changes,
        *,
        ping_seconds: float,
        call_seconds: float,
        restart_seconds: float,
        asleep: Callable[[], bool],
        restarted: Callable[[int], Awaitable[None]],
    ) -> None:
        self.members = list(members)
        self.health = FleetHealth(bounds, len(self.members))
        self.loads = LeastLoaded(len(self.members))
        """Requests of each member."""
        self.now = 0.0
        """Clock of the rounds of pings, in seconds."""
        self._changes = changes
        self._ping_seconds = ping_seconds
        self._call_seconds = call_seconds
        self._restart_seconds = restart_seconds
        self._asleep = asleep
        self._restarted = restarted
        self._calls = [MemberCalls() for _ in self.members]
        self._background = BackgroundTasks(self._fail)
        self._watching: asyncio.Task[None] | None = None
        self._defect: EngineError | None = None
        """Error that ended the rounds of pings."""
        self._closed = False

    async def aclose(self) -> None:
        """Ends all members, and the calls to them; may be called again."""
        self._closed = True
        self._changes.tell()
        await self._background.cancel()
        for calls in self._calls:
            calls.give_up()
        await asyncio.gather(*(end_member(m, n, self._call_seconds) for n, m in enumerate(self.members)))

    async def ask(self, engine: int, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a member's `work`.

        Raises:
            GaveUpError: it died meanwhile.
        """
        result = await self._calls[engine].ask(work)
        if self.health.alive(engine):
            suspect = not self.health.serves(engine)
            self.health.answered(engine, self.now)
            if suspect and self.health.serves(engine):
                self.offer(engine)
                self._changes.tell()
        return result

    async def ask_all(
        self, doing: str, call: Callable[[FleetMember], Coroutine[Any, Any, None]], seconds: float | None
    ) -> None:
        """Calls all living members."""
        self.watch()

        async def one(engine: int) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await self.ask(engine, call(self.members[engine]))
            except GaveUpError:
                pass
            except TimeoutError:
                self.mark_dead(engine, Death.SILENT, f"engine {engine} took more than {seconds:g} s to {doing}")
            except EngineError as error:
                self.mark_dead(engine, Death.FAILED, f"engine {engine} could not {doing}: {error}")

        await asyncio.gather(*map(one, self.health.living))

    async def end_dead(self) -> None:
        """Ends the processes of dead members that are restarted later."""
        dead = self.health.to_restart
        await asyncio.gather(*(end_member(self.members[engine], engine, self._call_seconds) for engine in dead))

    async def is_healthy(self, engine: int, error: str) -> bool:
        """Returns whether a member that raised `error` is healthy all the same; otherwise it is given up."""
        try:
            async with asyncio.timeout(self._call_seconds):
                await self.ask(engine, self.members[engine].ping())
            return True
        except GaveUpError:
            return False
        except (EngineError, TimeoutError):
            self.mark_dead(engine, Death.FAILED, f"engine {engine}: {error}")
            return False

    def mark_dead(self, engine: int, kind: Death, reason: str) -> None:
        """Gives a member up, unless it is dead already."""
        if self.health.alive(engine):
            self.health.died(engine, kind, reason)
            self._note_death(engine)

    def _note_death(self, engine: int) -> None:
        log.warning("fleet.engine_died", engine=engine, reason=self.health.last_reason, fleet=self.health.summary())
        self.offer(engine)
        self._calls[engine].give_up()
        self._changes.tell()
        if not self.health.restartable(engine):
            self._background.start(end_member(self.members[engine], engine, self._call_seconds))

    def offer(self, *engines: int) -> None:
        """Lets members that serve take requests: those that are named, or all."""
        for engine in engines or range(len(self.members)):
            self.loads.offer(engine, self.health.serves(engine))

    def raise_if_hopeless(self) -> None:
        """Checks that a member may still come to serve.

        Raises:
            EngineError: none ever will, and why.
        """
        if self._closed:
            raise EngineError("The engines are closed: no request can be made of them.")
        if self._defect is not None:
            raise self._defect
        if (failure := self.health.failure) is not None:
            raise EngineError(failure)

    def watch(self) -> None:
        """Starts the rounds of pings, of which there are none before the fleet is first used, nor when it is closed."""
        if not self._closed and (self._watching is None or self._watching.done()):
            self._watching = self._background.start(self._rounds())

    def _fail(self, error: BaseException) -> None:
        """Fails all requests that wait for an engine: after an error of a background task dead engines would not be
        found any more."""
        self._defect = EngineError(f"What watches the engines failed: {error_text(error)}")
        self._defect.__cause__ = error
        for calls in self._calls:
            calls.give_up()
        self._changes.tell()

    async def _rounds(self) -> None:
        loop = asyncio.get_running_loop()
        asked: set[int] = set()

        async def ping(engine: int) -> None:
            try:
                await self.ask(engine, self.members[engine].ping())
            except GaveUpError:
                pass
            except EngineError as error:
                self.mark_dead(engine, Death.FAILED, f"engine {engine}: {error}")
            finally:
                asked.discard(engine)

        while True:
            began = loop.time()
            await asyncio.sleep(self._ping_seconds)
            self.now += min(loop.time() - began, LONGEST_ROUND * self._ping_seconds)
            for engine in self.health.living:
                if engine not in asked and self.health.silence(engine, self.now) >= self._ping_seconds:
                    asked.add(engine)
                    self._background.start(ping(engine))
            for engine in self.health.tick(self.now):
                self._note_death(engine)
            self.offer()
            for engine in () if self._asleep() else self.health.to_restart:
                self.health.restarting(engine)
                self._background.start(self._replace(engine))

    async def _replace(self, engine: int) -> None:
        member = self.members[engine]
        try:
            async with asyncio.timeout(self._restart_seconds):
                await engine_work(member.restart())
        except Exception as error:  # however it fails, this member has no engine
            slow = f"it took more than {self._restart_seconds:g} s"
            reason = f"engine {engine} did not start again: {slow if isinstance(error, TimeoutError) else error}"
            self.health.died(engine, Death.START, reason)
            self._note_death(engine)
            return
        self.health.restarted(engine, self.now)
        log.info("fleet.engine_restarted", engine=engine, fleet=self.health.summary())
        self.offer(engine)
        self._changes.tell()
        if not self.health.serves(engine):
            await self._restarted(engine)
