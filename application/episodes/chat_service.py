"""`ChatService` replies to conversations that a client leads, an agent or a user.

A `RecordedSession` keeps the tokens of one training rollout in a `TokenLedger`; a call outside of any session is
sampled and forgotten. Invariants: the trainer decides the sampling settings of a recorded session (a client can only
shorten replies, by tokens or by stop texts). A turn is recorded when it is complete, and once however often the client
retries. Nothing is recorded after `seal`.
"""

import asyncio
import contextvars
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import structlog
from attrs import evolve

from rollgrad.application.episodes.chat_request import ChatRequest, Origin, RefusedError, SessionLimits, check_length
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.reply import ChatReply, OnPiece, sample_reply, sample_text
from rollgrad.application.episodes.stop_text import StopText
from rollgrad.application.episodes.turns import Prepared
from rollgrad.application.episodes.unlearned import UnlearnedReplies
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import ConfigurationError, ForeignError
from rollgrad.domain.ports.chat_codec import ChatCodec, ToolSchema
from rollgrad.domain.ports.rollout_engine import RolloutEngine

UNPRESCRIBED = (
    "The form of a reply (response_format, a tool_choice that requires a call) cannot be prescribed while the model is "
    "trained{}: the loss would not know the tokens that were allowed. Leave it out, and let the reward tell a wrong "
    "form."
)
"""Refusal of a `ReplyForm` in a recorded session, with the reason in its middle."""

log = structlog.get_logger(__name__)
Rendered = TypeVar("Rendered")


class ChatService:
    """Samples replies on `engine`.

    Args:
        engine: samples.
        codec: converts messages to tokens and back.
        max_waiting: largest number of requests in flight; more are refused (`busy`).
        max_tokens: of a conversation outside of sessions; None for no limit. A reply that would exceed it is truncated.
        unprescribed: the refusal of a `ReplyForm` in sessions; None where the trainer's log-probs are of the tokens
            that a form allows.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        codec: ChatCodec,
        *,
        max_waiting: int = 4096,
        max_tokens: int | None = None,
        unprescribed: str | None = UNPRESCRIBED.format(""),
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._max_waiting = max_waiting
        self._ignored: set[str] = set()
        self.max_tokens = max_tokens
        """Largest number of tokens of a conversation outside of sessions; None for no limit."""
        self.unprescribed = unprescribed
        """Refusal of a `ReplyForm` in sessions; None where they take it."""
        self.renderer = ThreadPoolExecutor(1, thread_name_prefix="chat-render")
        """Thread that tokenises conversations: a long one takes seconds, for which the event loop must not block."""
        self._in_flight = 0
        self._sessions: dict[str, RecordedSession] = {}

    @property
    def in_flight(self) -> int:
        """Number of requests being answered."""
        return self._in_flight

    @property
    def full(self) -> bool:
        """Whether another request would be refused."""
        return self._in_flight >= self._max_waiting

    def open(self, params: SamplingParams, limits: SessionLimits) -> "RecordedSession":
        """Returns a session that records a rollout; its `key` is the secret that gives access to it."""
        session = RecordedSession(self, TokenLedger(self._codec), params, limits)
        self._sessions[session.key] = session
        return session

    def session(self, key: str) -> "RecordedSession | None":
        """Returns the open session with this key."""
        return self._sessions.get(key)

    def tell_ignored(self, names: Collection[str]) -> None:
        """Warns, once for each name, of settings of clients that have no effect."""
        if new := sorted({*names} - self._ignored):
            self._ignored |= {*new}
            log.warning("client_settings_ignored", names=",".join(new), reason="the trainer decides how to sample")

    def forget(self, session: "RecordedSession") -> None:
        """Ends access to a session."""
        self._sessions.pop(session.key, None)

    async def reply(
        self,
        request: ChatRequest,
        defaults: SamplingParams,
        *,
        on_piece: OnPiece | None = None,
        max_tokens: int | None = None,
    ) -> ChatReply:
        """Answers and records nothing, with the client's settings over `defaults`. `max_tokens`: of the conversation,
        if not the service's own.

        Raises:
            RefusedError: the conversation leaves no room for a reply, or too many requests are in flight.
        """
        with self.place():
            prepared = await self._prepared(request)
            params = request.params(defaults)
            longest = max_tokens or self.max_tokens
            room = prepared.room(params.max_new_tokens, longest)
            if room < 1:
                sentence = _no_room(prepared, f"the {longest} that the model takes: shorten it")
                raise RefusedError(sentence, "context_length")
            params = evolve(params, max_new_tokens=room)
            return await self.sample(prepared, params, request, on_piece=on_piece)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Returns the tokens of a conversation with the beginning of a reply.

        Raises:
            DataError: the template refuses the messages.
            RefusedError: the conversation is too long for the model, or too many requests are in flight.
        """
        with self.place():
            return len((await self._prepared(request)).token_ids)

    async def _prepared(self, request: ChatRequest) -> Prepared:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return Prepared(token_ids=prompt)
        if prompt is not None:
            tokens = await self.rendered(request, lambda messages, tools: self._codec.encode_prompt(prompt))
            return Prepared(token_ids=tokens)
        rendered = await self.rendered(request, self._codec.render)
        return Prepared(
            token_ids=rendered.token_ids,
            images=rendered.images,
            messages=tuple(request.messages),
            tools=tuple(request.tools),
        )

    async def rendered(
        self, request: ChatRequest, render: Callable[[Sequence[Message], Sequence[ToolSchema]], Rendered]
    ) -> Rendered:
        """Calls `render` with the conversation, off the event loop; returns its result.

        Raises:
            RefusedError: the conversation has more characters than fit into the model's positions.
            ForeignError: the template or the tokenizer failed.
        """
        if self.max_tokens is not None:
            check_length(request, self.max_tokens)

        def told() -> Rendered:
            with foreign_code(ForeignError):
                return render(request.messages, request.tools)

        return await asyncio.get_running_loop().run_in_executor(self.renderer, told)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Counts a request as in flight inside the block.

        Raises:
            RefusedError: too many are in flight.
        """
        if self.full:
            raise RefusedError(f"{self._in_flight} requests are in flight, the most that are taken: try again.", "busy")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def sample(
        self,
        prepared: Prepared,
        params: SamplingParams,
        request: ChatRequest,
        *,
        on_piece: OnPiece | None = None,
    ) -> ChatReply:
        """Samples one reply to `prepared` in the form of the request, up to the first of its stop texts.

        Raises:
            DataError: this model's replies cannot be given the form.
            EngineError: the engine ended the request before its first token.
        """
        request.on_read(len(prepared.token_ids))
        if request.prompt is None:
            sampled = partial(sample_reply, self._engine, self._codec, prepared, params, form=request.form)
        else:
            sampled = partial(sample_text, self._engine, self._codec, prepared, params)
        if not request.stops:
            return await sampled(on_piece=on_piece)
        cut = StopText(request.stops, on_piece)
        return cut.finish(await sampled(on_piece=None if on_piece is None else cut.hear))


class RecordedSession:
    """The rollout of an agent that calls the server; made by `ChatService.open`."""

    def __init__(
        self, service: ChatService, ledger: TokenLedger, params: SamplingParams, limits: SessionLimits
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        self.unlearned = UnlearnedReplies(service.reply, params, limits.max_turns, limits.max_tokens)
        """Replies of the policy in the episode that nothing is learned from."""
        self.ledger = ledger
        self.stopped: StopReason | None = None
        """The limit that a request reached, if no reply has begun after that and come to its end."""
        self.refused: dict[str, int] = {}
        """Requests refused, by kind."""
        self.refusal = ""
        """Sentence that the last one of them was told."""
        self._service = service
        # The context of the episode: what is recorded of its replies belongs to it.
        self._context = contextvars.copy_context()
        self._params = params
        self._limits = limits
        self._sealed = False
        self._numbers: set[int] = set()
        self.asked = 0
        """Replies that were begun."""
        self._replies: dict[str, tuple[str, list[asyncio.Task[ChatReply]]]] = {}
        self._running: set[asyncio.Task[ChatReply]] = set()
        self._waiting: Counter[asyncio.Task[ChatReply]] = Counter()
        self._delivered: set[asyncio.Task[ChatReply]] = set()
        self._recorded: dict[asyncio.Task[Any], int] = {}

    async def reply(
        self, request: ChatRequest, *, origin: "Origin | None" = None, on_piece: OnPiece | None = None
    ) -> ChatReply:
        """Answers a request and records the reply. A retry gets the reply of the request that it repeats, even while
        that is being sampled (then without pieces). So a reply is completed even if its caller is cancelled. A failed
        reply is sampled again, and counts as no turn.

        Raises:
            RefusedError: the session is over, a limit is reached, or a retry has another body.
        """
        repeated = self._repeated(origin, streamed=on_piece is not None)
        if repeated is not None:
            return await self._reply_of(repeated)
        if self._sealed:
            self._refuse("The session is closed: its episode has ended.", "sealed")
        if request.form is not None and self._service.unprescribed is not None:
            self._refuse(self._service.unprescribed, "unsupported")
        if request.prompt is not None:
            self._refuse(
                "A session records conversations: ask for chat completions instead of completions.", "unsupported"
            )
        number = next(number for number in itertools.count() if number not in self._numbers)
        if number >= self._limits.max_turns:
            self.stopped = StopReason.TURN_LIMIT
            self._refuse(f"The session has had its {self._limits.max_turns} replies (rollout.max_turns).", "turn_limit")
        self._numbers.add(number)
        self.asked += 1
        task = asyncio.create_task(self._answer(request, number, on_piece), context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._finished)
        if origin is not None:
            self._replies.setdefault(origin.key, (origin.digest, []))[1].append(task)
        return await self._reply_of(task)

    async def seal(self) -> None:
        """Ends the session: later requests are refused, and those in flight are cancelled; idempotent.

        A reply that reached no caller, and that no turn continues, is left out of the record.
        """
        self._sealed = True
        self.unlearned.close()
        self._service.forget(self)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task, turn in self._recorded.items():
            if task not in self._delivered:
                self.ledger.drop_leaf(turn)

    def refuse_length(self, message: str) -> NoReturn:
        """Refuses a request whose conversation is too long, by a `RefusedError`."""
        self.stopped = StopReason.LENGTH
        self._refuse(message, "context_length")

    def _repeated(self, origin: "Origin | None", *, streamed: bool) -> "asyncio.Task[ChatReply] | None":
        """Returns the request that this one repeats: one whose caller left unseen, or of a marked retry any."""
        if origin is None:
            return None
        digest, tasks = self._replies.get(origin.key, (origin.digest, []))
        if digest != origin.digest:
            self._refuse("The idempotency key was used before, with another body.", "conflict")
        left = {task for task in tasks if not self._waiting[task] and task not in self._delivered}
        tasks = tasks if origin.is_retry else [task for task in tasks if task in left and not streamed]
        usable = [task for task in reversed(tasks) if not (task.done() and (task.cancelled() or task.exception()))]
        return min(usable, key=lambda task: (task not in left, task in self._delivered), default=None)

    async def _reply_of(self, task: "asyncio.Task[ChatReply]") -> ChatReply:
        self._waiting[task] += 1
        try:
            reply = await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
        self._delivered.add(task)
        return reply

    async def _answer(self, request: ChatRequest, number: int, on_piece: OnPiece | None) -> ChatReply:
        task, refused = asyncio.current_task(), sum(self.refused.values())
        assert task is not None
        try:
            # A template, a tokenizer or an engine's library may raise anything.
            with self._service.place(), foreign_code(ForeignError):
                self._check_length(request)
                prepared = await self._service.rendered(
                    request, partial(self.ledger.prepare, role=request.role, follows=request.follows)
                )
                params = self._settings(request, prepared, number)
                reply = await self._sampled(prepared, params, request, on_piece)
                if self._sealed:
                    self._refuse("The session is closed: its episode has ended.", "sealed")
                turn = self._recorded[task] = self.ledger.commit(prepared, reply.generation, reply.parsed.message)
        except BaseException:  # also a cancellation
            self._numbers.discard(number)
            raise
        if sum(self.refused.values()) == refused:
            self.stopped = None  # the agent has shortened its conversation, and goes on
        return evolve(reply.narrowed(request.changes.get("top_logprobs", 0)), turn=turn)

    def _check_length(self, request: ChatRequest) -> None:
        if self._limits.max_tokens is None:
            return
        try:
            check_length(request, self._limits.max_tokens)
        except RefusedError as error:
            self.refuse_length(str(error))

    async def _sampled(
        self, prepared: Prepared, params: SamplingParams, request: ChatRequest, on_piece: OnPiece | None
    ) -> ChatReply:
        try:
            return await self._service.sample(prepared, params, request, on_piece=on_piece)
        except ConfigurationError as error:  # the engine: more tokens than the model has positions
            self.refuse_length(str(error))

    def _settings(self, request: ChatRequest, prepared: Prepared, number: int) -> SamplingParams:
        params = self._params
        ignored = sorted(
            name
            for name, value in request.changes.items()
            if name not in ("max_new_tokens", "seed", "stop_strings", "top_logprobs") and value != getattr(params, name)
        )
        self._service.tell_ignored(ignored)
        wanted = min(params.max_new_tokens, request.changes.get("max_new_tokens", params.max_new_tokens))
        room = prepared.room(wanted, self._limits.max_tokens)
        if room < 1:
            limit = f"{self._limits.max_tokens} (rollout.max_episode_tokens or data.max_len)"
            self.refuse_length(_no_room(prepared, limit))
        return evolve(
            params,
            max_new_tokens=room,
            stop_strings=(*params.stop_strings, *request.stops),
            seed=(params.seed + number) % 2**63,
            top_logprobs=max(params.top_logprobs, request.changes.get("top_logprobs", 0)),
        )

    def _refuse(self, message: str, kind: str) -> NoReturn:
        self.refused[kind] = self.refused.get(kind, 0) + 1
        self.refusal = message
        raise RefusedError(message, kind)

    def _finished(self, task: "asyncio.Task[ChatReply]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as seen, because no caller may be left


def _no_room(prepared: Prepared, limit: str) -> str:
    return f"The conversation has {len(prepared.token_ids)} tokens, which leaves no room for a reply within {limit}."
