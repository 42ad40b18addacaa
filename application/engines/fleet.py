"""Several engines behind one: requests go to the least loaded, the turns of an episode to the engine that has the
earlier ones, an engine that dies is replaced, and its requests are played again on others.

Invariants: every `generate` ends once, with an answer or an error, and within `wait_seconds` if no engine serves; an
engine that serves has the current weights (`domain.control.engine_health`). While the fleet is paused or asleep, new
requests wait here and not in the engines, so that replacements need not be paused too.
Does not own: how engines run (`FleetMember`), and how weights reach them (`refresh`, installed by the weight channel).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from rollgrad.application.engines.changes import Changes
from rollgrad.application.engines.fleet_member import FleetMember, GaveUpError, Listener, Taker
from rollgrad.application.engines.watched_members import WatchedMembers
from rollgrad.domain.control.engine_health import Death, EngineState, FleetBounds, Recent
from rollgrad.domain.control.request_flow import ArrivedRequest, RequestFlow
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

log = structlog.get_logger(__name__)


class EngineFleet(RolloutEngine):
    """A `RolloutEngine` for one event loop; the members have been started, but for those that failed at it.

    A request whose engine dies is played again from its beginning with the same seed, so its tokens differ only if the
    weights have changed or products are rounded differently. One that `on_token` has heard of goes on after what it has
    heard, if engines tell how they sampled it. Otherwise, or if it has a form, stop strings or `top_logprobs`, it is
    played again too: `on_token` is called only for new positions, and if it has heard other tokens the request fails. A
    request that `on_token` has heard of is replayed before `pause(WAIT)` ends, if an engine serves. Another that begins
    or is replayed during a pause waits for `resume`, and the pause does not wait for it; `pause(ABORT)` ends it at
    once, unless `on_token` has heard more of it than there is to return.

    Args:
        members: the engines, all with the same weights.
        not_started: reasons of those that did not start, by number: they are restarted as if they had died.
        bounds: bounds of silence and restarts.
        ping_seconds: seconds between rounds in which silent members are pinged, and dead ones replaced.
        call_seconds: longest that a member may take to pause (but for a pause that waits), resume, sleep and wake.
        wait_seconds: longest that a request waits for an engine that serves, pauses not counted.
        restart_seconds: longest that a member may take to start again.
    """

    def __init__(
        self,
        members: Sequence[FleetMember],
        *,
        not_started: Mapping[int, str] | None = None,
        bounds: FleetBounds | None = None,
        ping_seconds: float = 2.0,
        call_seconds: float = 120.0,
        wait_seconds: float = 600.0,
        restart_seconds: float = 600.0,
    ) -> None:
        self._flow = RequestFlow()
        self._changes = Changes()
        self._watched = WatchedMembers(
            members,
            bounds or FleetBounds(),
            self._changes,
            ping_seconds=ping_seconds,
            call_seconds=call_seconds,
            restart_seconds=restart_seconds,
            asleep=lambda: self._flow.asleep,
            restarted=self._refresh,
        )
        self.health = self._watched.health
        for number, reason in (not_started or {}).items():
            self.health.died(number, Death.START, f"engine {number} did not start: {reason}")
            log.warning("fleet.engine_died", engine=number, reason=self.health.last_reason, fleet=self.health.summary())
        self._watched.offer()
        self.max_tokens = members[self.health.living[0]].max_tokens
        self.replayed = 0
        """Number of requests played again, or continued, because their engine died."""
        self.refresh: Callable[[Taker], Awaitable[None]] | None = None
        """Brings the current weights to a member that has restarted, and says so by `took` or `lost`; without it, or if
        it does neither, the member waits for the next push."""
        self._call_seconds = call_seconds
        self._wait_seconds = wait_seconds
        self._seen = Recent()
        """Engine that had tokens last with which a later request may begin, by their hash: a prompt's opening, and of
        requests to `keep` prompt and reply."""

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`.

        Raises:
            EngineError: no engine served it in time or ever will, or a healthy one refused it.
        """
        self._watched.watch()
        listener = Listener(on_token)
        arrived = self._flow.arrive()
        try:
            while True:
                engine = await self._assigned(request, arrived, ends=not listener.told)
                if engine is None:
                    return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=StopReason.ABORTED)
                part = await self._run(engine, listener.rest(request), listener)
                part = None if part is None else listener.joined(part)
                if part is not None and listener.accepts(part):
                    if request.keep:
                        self._seen.put(hash((*request.prompt_token_ids, *part.token_ids)), engine)
                    return part
                if not listener.told:
                    self._wait_again(arrived)
                self.replayed += 1
        finally:
            self._wait_again(arrived)
            self._flow.end(arrived)

    async def pause(self, mode: PauseMode) -> None:
        """Implements `RolloutEngine.pause`; a member that fails at it is replaced."""
        frozen = self._flow.paused
        self._flow.pause(mode)
        self._changes.tell()
        if self._flow.draining and not frozen:  # members that are paused could not play the requests of a dead one
            await self._changes.until(lambda: not (self._flow.draining and self._flow.has_begun))
            if not self._flow.draining:
                return  # somebody resumed, or paused in another way, which the members must keep
        seconds = None if mode is PauseMode.WAIT else self._call_seconds
        await self._watched.ask_all("pause", lambda member: member.pause(mode), seconds)
        self._flow.drained()

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`; a member that fails at it is replaced."""
        self._flow.resume()  # first, so that a pause that still waits does not pause members after this
        self._changes.tell()
        await self._watched.ask_all("resume", lambda member: member.resume(), self._call_seconds)

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`; a member that fails at it is replaced. Dead ones are replaced after `wake`,
        and leave their memory at once."""
        self._flow.sleep()
        while self.health.states[EngineState.RESTARTING]:  # it would start awake; its own deadline ends this
            await self._wait_for_change("replacements of engines before they sleep", None)
        await self._watched.ask_all("sleep", lambda member: member.sleep(), self._call_seconds)
        await self._watched.end_dead()

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`; a member that fails at it is replaced."""
        await self._watched.ask_all("wake", lambda member: member.wake(), self._call_seconds)
        self._flow.wake()
        self._changes.tell()

    async def until_hopeless(self) -> None:
        """Watches the engines until none will ever serve again.

        Raises:
            EngineError: none will; it says why.
        """
        self._watched.watch()
        while True:
            self._watched.raise_if_hopeless()
            await self._changes.next()

    async def aclose(self) -> None:
        """Ends all members; requests in flight raise `EngineError`. May be called again."""
        await self._watched.aclose()

    def new_weights(self, version: int) -> None:
        """Records that weights of `version` are being sent: no member serves until it `took` them.

        Raises:
            EngineError: requests are in flight and generation is not paused, or the engines sleep.
        """
        self._flow.require_change_of_weights()
        self.health.weights(version)
        self._watched.offer()

    async def takers(self) -> list[Taker]:
        """Waits for a living member; returns all living members, to which new weights go.

        Raises:
            EngineError: none lived in time, or ever will.
        """
        self._watched.watch()
        until = self._deadline()
        while not self.health.living:
            self._watched.raise_if_hopeless()
            await self._wait_for_change("an engine that takes weights", until)
        return [self._taker(number) for number in self.health.living]

    def took(self, takers: Sequence[Taker], version: int) -> None:
        """Records that members have weights of `version`; those that still live serve, if the version is still
        current."""
        for taker in takers:
            if self._lives(taker) and version == self.health.version:
                self.health.took(taker.number, version, self._watched.now)
                self._watched.offer(taker.number)
        self._changes.tell()

    def lost(self, taker: Taker, reason: str) -> None:
        """Records that a member failed to take weights."""
        if self._lives(taker):
            self._watched.mark_dead(taker.number, Death.WEIGHTS, f"engine {taker.number}: {reason}")

    def _taker(self, number: int) -> Taker:
        return Taker(self._watched.members[number], number, self.health.restarts(number))

    async def _refresh(self, engine: int) -> None:
        if self.refresh is None:
            return
        try:
            await self.refresh(self._taker(engine))
        except Exception as error:  # of the trainer's side: the next push brings it out
            log.warning("fleet.no_refresh", engine=engine, reason=f"{type(error).__name__}: {error}")

    def _lives(self, taker: Taker) -> bool:
        return self.health.alive(taker.number) and self.health.restarts(taker.number) == taker.life

    async def _assigned(self, request: GenerationRequest, arrived: ArrivedRequest, *, ends: bool) -> int | None:
        """Returns an engine for a request, which counts among its requests; None if an abort has come since it arrived,
        and `ends` it."""
        prompt = request.prompt_token_ids
        opening = hash(prompt[: len(prompt) - request.begun])
        continues = hash(prompt[: request.continues]) if request.continues else None
        until = None
        while True:
            self._watched.raise_if_hopeless()
            if ends and self._flow.aborted(arrived):
                return None
            playable = self._flow.may_begin or (self._flow.draining and arrived.begun)
            if playable and (engine := self._offered(opening, continues)) is not None:
                self._seen.put(opening, engine)
                self._flow.begin(arrived)
                return engine
            until = (until or self._deadline()) if self._flow.may_begin else None
            if not self._flow.may_begin:
                self._wait_again(arrived)
            await self._wait_for_change("an engine that serves", until)

    def _offered(self, opening: int, continues: int | None) -> int | None:
        """Returns an engine that takes a request, None if there is none: the one that has the request's beginning,
        unless it has many more requests than others."""
        had = None if continues is None else self._seen.get(continues)
        if had is not None:
            return self._watched.loads.acquire(had, near=True)
        return self._watched.loads.acquire(self._seen.get(opening))

    def _wait_again(self, arrived: ArrivedRequest) -> None:
        """Makes a request one that has not begun, for which no pause waits."""
        if arrived.begun:
            self._flow.wait_again(arrived)
            if self._flow.draining and not self._flow.has_begun:
                self._changes.tell()

    async def _run(self, engine: int, request: GenerationRequest, listener: Listener) -> Generation | None:
        """Plays a request on a member; returns None if the member died."""
        member = self._watched.members[engine]
        try:
            return await self._watched.ask(engine, member.generate(request, on_token=listener.attempt()))
        except GaveUpError:
            return None
        except EngineError as error:
            if await self._watched.is_healthy(engine, str(error)):
                raise
            return None
        finally:
            listener.over()
            self._watched.loads.release(engine)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._wait_seconds

    async def _wait_for_change(self, what: str, until: float | None) -> None:
        """Waits for any change, for the sake of `what`; raises if none comes until that time of the event loop."""
        if not await self._changes.next(at=until):
            raise EngineError(f"Waited {self._wait_seconds:g} s for {what}; the fleet is: {self.health.summary()}.")
