"""A `RolloutEngine` that says what a test wrote for it, and the agent server around it."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.server import Server
from rollgrad.application.episodes.chat_request import SessionLimits
from rollgrad.application.episodes.chat_service import ChatService, RecordedSession
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.trajectory import SegmentKind
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

MODEL = "policy"
Script = Sequence[str] | Callable[[str], str]
"""Replies in order, or a function of the prompt's text."""


class ScriptedEngine(RolloutEngine):
    """Answers with the script's texts, as `codec` encodes them, and `eos`; a token a turn of the event loop.

    Replies wait for `free` after their first token, and fail there if it is `dead`. `waiting` counts the requests in
    flight, `failures` the next ones that fail. `said` has prompt and reply of each request that ended, `cancelled`
    counts those that were given up.
    """

    def __init__(self, codec: ChatCodec, eos: int, script: Script = ()) -> None:
        self._codec, self._eos = codec, eos
        self._script = script if callable(script) else iter(script)
        self.free = asyncio.Event()
        self.free.set()
        self.waiting = 0
        self.cancelled = 0
        self.failures = 0
        self.dead = False
        self.requests: list[GenerationRequest] = []
        self.said: list[tuple[tuple[int, ...], Generation]] = []

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        self.requests.append(request)
        if self.failures:
            self.failures -= 1
            raise EngineError("Generation failed: out of memory")
        prompt = self._codec.decode(request.prompt_token_ids, special_tokens=True)
        text = self._script(prompt) if callable(self._script) else next(self._script)
        self.waiting += 1
        try:
            generation = await self._draw(request, (*self._codec.encode(text), self._eos), on_token)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        self.said.append((request.prompt_token_ids, generation))
        return generation

    def prompt(self, index: int) -> str:
        """The text that request number `index` was given."""
        return self._codec.decode(self.requests[index].prompt_token_ids)

    async def _draw(
        self, request: GenerationRequest, script: Sequence[int], on_token: Callable[[int], None] | None
    ) -> Generation:
        tokens: list[int] = []
        reason = StopReason.LENGTH
        for token in script[: request.params.max_new_tokens]:
            await asyncio.sleep(0)
            if tokens:
                await self.free.wait()
                if self.dead:
                    raise EngineError("The engine has died.")
            tokens.append(token)
            if on_token is not None:
                on_token(token)
            text = self._codec.decode(tokens)
            if token == self._eos or any(stop in text for stop in request.params.stop_strings):
                reason = StopReason.STOP
                break
        noise = random.Random(len(self.said))
        logprobs = [-noise.randrange(1, 1024) / 1024 for _ in tokens]  # float32 has them exactly
        return Generation(token_ids=tokens, logprobs=logprobs, versions=[0] * len(tokens), stop_reason=reason)

    async def pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def sleep(self) -> None:
        raise NotImplementedError

    async def wake(self) -> None:
        raise NotImplementedError


@frozen(kw_only=True)
class Served:
    """A running agent server. `url` is its root, `session` one open session."""

    url: str
    service: ChatService
    session: RecordedSession

    @property
    def root(self) -> str:
        """Address of the session, as Anthropic's clients take it."""
        return f"{self.url}/s/{self.session.key}"

    @property
    def base(self) -> str:
        """Address of the session, as OpenAI's clients take it."""
        return f"{self.root}/v1"

    def open(self, **limits: Any) -> RecordedSession:
        """Another session."""
        settings = {"max_turns": 1000, **limits}
        params = SamplingParams(max_new_tokens=200, seed=7)
        return self.service.open(params, SessionLimits(**settings))


@asynccontextmanager
async def serving(
    engine: RolloutEngine, codec: ChatCodec, *, stateless: bool = False, max_waiting: int = 4096, **limits: Any
) -> AsyncIterator[Served]:
    """A server on a real socket, in this loop. `stateless`: it also answers outside of sessions."""
    service = ChatService(engine, codec, max_waiting=max_waiting)
    defaults = SamplingParams(max_new_tokens=200)

    async def answer(request: Any, on_piece: Any) -> Any:
        return await service.reply(request, defaults, on_piece=on_piece)

    app = AgentServer(service, codec, model=MODEL, answer=answer if stateless else None).app()
    server = Server(app, name="agent server")
    url = await server.start()
    first = Served(url=url, service=service, session=None)  # type: ignore[arg-type]
    served = Served(url=url, service=service, session=first.open(**limits))
    try:
        yield served
    finally:
        if isinstance(engine, ScriptedEngine):
            engine.free.set()
        await served.session.seal()
        await server.stop()


def assert_recorded(
    session: RecordedSession, said: Sequence[tuple[tuple[int, ...], Generation]], *, branches: int = 1
) -> None:
    """The session's trajectories have exactly these replies as actions, each once, each behind its own prompt."""
    trajectories = session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.ENVIRONMENT)
    assert len(trajectories) == branches
    found = []
    for trajectory in trajectories:
        tokens, logprobs = trajectory.token_ids_T.tolist(), trajectory.logprobs_T.tolist()
        for segment in trajectory.segments:
            if segment.kind is SegmentKind.ACTION:
                part = slice(segment.start, segment.stop)
                found.append((tuple(tokens[: segment.start]), tuple(tokens[part]), tuple(logprobs[part])))
    wanted = [(prompt, tuple(reply.token_ids), tuple(reply.logprobs)) for prompt, reply in said]
    assert Counter(found) == Counter(wanted)
