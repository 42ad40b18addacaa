"""Adapters of `AgentSession` and `LLMEngine` to rollgrad's ports, so that its loop can play them.

They are for serving only: such an engine reports no log-probs, so its samples cannot be trained on. Engines and
environments block, so they run in threads.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from rollgrad.adapters.openrlhf.agent_library.model import LLMEngine, Piece
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.episodes.messages import Action, Message, ParsedReply, ReplyForm, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, ReplyStream, ToolSchema
from rollgrad.domain.ports.environment import Environment, StepResult
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

_TEXT_ONLY = "An OpenRLHF-Agent session is played in text: its template writes the messages, not the codec."


class EngineCodec(ChatCodec):
    """The engine's tokenizer; it can decode only tokens that the engine sampled."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.texts: dict[tuple[int, ...], str] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text; an empty text needs no request."""
        return tuple(self._engine.tokenize(text)) if text else ()

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text, as the engine's tokenizer begins one."""
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text that the engine gave with these tokens."""
        return self.texts[tuple(token_ids)]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Refuses, because the session writes its own prompts."""
        raise EngineError(_TEXT_ONLY)

    def extend(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> tuple[int, ...] | None:
        """Returns None, because conversations continue as text."""
        return None

    @property
    def end_of_turn(self) -> str:
        """Empty text, because it is not known."""
        return ""

    def parse(
        self, text: str, prompt: str, tools: Sequence[ToolSchema] = (), form: ReplyForm | None = None
    ) -> ParsedReply:
        """Returns the text unchanged, because the session parses the calls."""
        return ParsedReply(message=assistant_message(text))

    def grammar(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Refuses, because the engine's server is asked for a text alone."""
        raise EngineError(_TEXT_ONLY)

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> ReplyStream:
        """Refuses, because the session parses whole replies."""
        raise EngineError(_TEXT_ONLY)


class ServedEngine(RolloutEngine):
    """Samples with `engine`, at its default temperature; log-probs are 0 and meaningless. `on_text` is called with each
    part of a reply's text as it is sampled, in a thread; None asks for whole replies."""

    def __init__(self, engine: LLMEngine, codec: EngineCodec, on_text: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._codec = codec
        self._on_text = on_text

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Returns one reply."""
        prompt, limit = list(request.prompt_token_ids), request.params.max_new_tokens
        sampled, text = await asyncio.to_thread(self._sample, prompt, limit)
        token_ids = tuple(int(token) for token in sampled)
        self._codec.texts[token_ids] = text
        if on_token is not None:
            for token in token_ids:
                on_token(token)
        zeros = [0] * len(token_ids)
        return Generation(token_ids=token_ids, logprobs=zeros, versions=zeros, stop_reason=StopReason.STOP)

    def _sample(self, prompt: list[int], limit: int) -> Piece:
        streamed = {} if self._on_text is None else {"stream": True}
        given = self._engine.generate(prompt, max_tokens=limit, **streamed)
        # An engine of one's own may not stream, and give the one reply as a list of its tokens and its text.
        whole = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], str)
        parts = cast("Iterable[Piece]", [given] if whole else given)
        token_ids, texts = list[int](), list[str]()
        for tokens, text in parts:
            token_ids += tokens
            texts.append(text)
            if text and self._on_text is not None:
                self._on_text(text)
        return token_ids, "".join(texts)

    async def pause(self, mode: PauseMode) -> None:
        """Does nothing: weights never change."""

    async def resume(self) -> None:
        """Does nothing."""

    async def sleep(self) -> None:
        """Does nothing: the memory is the server's."""

    async def wake(self) -> None:
        """Does nothing."""


class ServedEnvironment(Environment):
    """A session that serves a user (`step_from_text`); `info["step"]` is its result."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def reset(self, prompt: Prompt) -> str:
        """Returns an empty text, because the prompt's author has started the session."""
        return ""

    async def step(self, action: Action) -> StepResult:
        """Carries out the calls of the reply."""
        answer = await asyncio.to_thread(self._session.step_from_text, action.text, runtime=True)
        return StepResult(observation=answer.rendered_observation, terminated=answer.terminated, info={"step": answer})

    async def close(self) -> None:
        """Releases nothing."""
