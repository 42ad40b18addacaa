"""One engine of a fleet: its protocol, and calls to it that end when it is given up."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

import structlog
from attrs import define, evolve, field, frozen

from rollgrad.application.engines.resuming import remaining
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import RolloutEngine, SampleListener

log = structlog.get_logger(__name__)

T = TypeVar("T")


@runtime_checkable
class FleetMember(RolloutEngine, Protocol):
    """An engine that can be replaced; all its methods raise `EngineError` when it has died."""

    async def ping(self) -> None:
        """Returns normally if the engine is healthy."""
        ...

    async def restart(self) -> None:
        """Ends the rest of the engine and starts it again, with its initial weights."""
        ...

    async def close(self) -> None:
        """Ends the engine; idempotent, and raises nothing if it is dead."""
        ...


@frozen(eq=False)
class Taker:
    """A member that takes weights, in one of its lives, which are counted by restarts. Events of one life have no
    effect on the next."""

    member: FleetMember
    number: int
    life: int


class GaveUpError(Exception):
    """The engine of a call has been given up."""


async def engine_work(work: Awaitable[T]) -> T:
    """Returns the result of `work`; errors of Ray, of a library or of an unexpected answer become rollgrad's."""
    with foreign_code(lambda words: EngineError(f"The engine raised {words}")):
        return await work


def engine_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Returns a task of `engine_work(work)`; cancelled before it begins, it closes `work`, which nobody awaits then."""
    task = asyncio.create_task(engine_work(work))
    task.add_done_callback(lambda _: work.close())
    return task


async def end_member(member: FleetMember, number: int, seconds: float) -> None:
    """Closes a member that is not used any more; one that does not close within `seconds` is abandoned."""
    try:
        async with asyncio.timeout(seconds):
            await member.close()
    except (TimeoutError, EngineError) as error:
        log.warning("fleet.not_closed", engine=number, reason=str(error) or "no answer in time")


@define
class BackgroundTasks:
    """Tasks of engine work that nobody awaits; `failed` hears the error of one."""

    failed: Callable[[BaseException], None]
    _tasks: set[asyncio.Task[None]] = field(factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task, and returns it."""
        task = engine_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancels all tasks, and waits for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)


@define
class MemberCalls:
    """The calls to one member that wait for its answer."""

    _waiting: dict[asyncio.Future[Any], None] = field(factory=dict)
    _lives: int = 1
    """Number of the member's lives, this one included."""

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the member's `work`.

        Raises:
            GaveUpError: `give_up` was called meanwhile.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # Reads the error of a call that nobody waits for any more: asyncio would print a trace of an unread one.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        task = engine_task(work)

        def pass_on(done: asyncio.Task[T]) -> None:
            error = EngineError("The engine cancelled the call.") if done.cancelled() else done.exception()
            if answer.done():
                return
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        task.add_done_callback(pass_on)
        self._waiting[answer] = None
        life = self._lives
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([answer])  # so that the call has ended before the member is put to sleep
            raise
        except EngineError as error:
            if life != self._lives:  # the error came first, but had not been seen when the member was given up
                raise GaveUpError from error
            raise
        finally:
            del self._waiting[answer]
            task.cancel()

    def give_up(self) -> None:
        """Ends all waits."""
        self._lives += 1
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(GaveUpError())


@define(eq=False)
class Listener:
    """Calls `on_token`, if there is one, once for each position of a reply, however often the reply is played. Where
    engines tell how they sampled, a later attempt goes on after the tokens that were told; otherwise it begins again,
    and one that samples another token than was told tells nothing from there on."""

    on_token: Callable[[int], None] | None
    _told: list[int] = field(factory=list)
    _samples: list[tuple[float, int]] = field(factory=list)
    """Log-prob and version of the first of them, as far as engines have said."""
    _whole: bool = False
    """Whether the last one is the reply's last."""
    _attempt: int = 0
    _begun: int = 0
    """Number of tokens that the attempt goes on after."""

    @property
    def told(self) -> int:
        """Number of positions for which `on_token` has been called."""
        return len(self._told)

    def rest(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request of the next attempt. It continues after the tokens that were told, if these are known in
        full and nothing after them depends on earlier ones (a form, a text that ends the reply); otherwise it begins
        again."""
        params = request.params
        known = len(self._samples) == self.told and not self._whole and self.told < params.max_new_tokens
        depends = params.grammar is not None or params.stop_strings or params.top_logprobs
        self._begun = self.told if known and not depends else 0
        return remaining(request, self._told[: self._begun], request.known_experts)

    def attempt(self) -> Callable[[int], None] | None:
        """Returns the `on_token` of an attempt, which has an effect until the attempt is `over`."""
        if self.on_token is None:
            return None
        return _Hearing(self, self._attempt, self._begun)

    def hear(self, attempt: int, place: int, token: int, sample: "tuple[float, int, bool] | None") -> None:
        """Hears the token at a place of the reply in an attempt, and how it was sampled if that is known."""
        if attempt != self._attempt or self.on_token is None:
            return
        if place == self.told:
            if sample is not None and len(self._samples) == place:
                self._samples.append(sample[:2])
                self._whole = sample[2]
            self._told.append(token)
            self.on_token(token)
        elif token != self._told[place]:
            self.over()

    def joined(self, reply: Generation) -> Generation:
        """Returns the reply of an attempt with the tokens that it went on after."""
        if not self._begun:
            return reply
        before = self._samples[: self._begun]
        return evolve(
            reply,
            token_ids=[*self._told[: self._begun], *reply.token_ids],
            logprobs=[*(logprob for logprob, _ in before), *reply.logprobs],
            versions=[*(version for _, version in before), *reply.versions],
            kept=None,  # the number is of the last attempt, not of the whole request
        )

    def accepts(self, reply: Generation) -> bool:
        """Returns whether a reply has all tokens that were told; one that was aborted may have too few.

        Raises:
            EngineError: it has others.
        """
        if [*reply.token_ids[: self.told]] != self._told[: len(reply.token_ids)]:
            raise EngineError("The engine of a streamed reply died, and another sampled other tokens: ask again.")
        return len(reply.token_ids) >= self.told

    def over(self) -> None:
        """Ends an attempt: tokens that its engine still sends are ignored."""
        self._attempt += 1


@define(eq=False)
class _Hearing(SampleListener):
    """The `on_token` of one attempt; `_place` is that of the next token."""

    _listener: Listener
    _attempt: int
    _place: int
    _sample: tuple[float, int, bool] | None = None

    def sampled(self, logprob: float, version: int, last: bool) -> None:
        self._sample = logprob, version, last

    def __call__(self, token: int) -> None:
        sample, self._sample = self._sample, None
        place, self._place = self._place, self._place + 1
        self._listener.hear(self._attempt, place, token, sample)
