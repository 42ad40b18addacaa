"""`Assistant` serves a trained policy with the runtime, tools and codec of training.

Nothing is recorded for learning; a `Conversation` still has a ledger, so that the model reads the tokens that it
sampled, as in training.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from attrs import evolve

from rollgrad.application.episodes.chat_request import ChatRequest, RefusedError, check_length
from rollgrad.application.episodes.chat_service import ChatService
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.reply import ChatReply, OnPiece
from rollgrad.application.episodes.runtime import AgentRuntime, PlayedTurn
from rollgrad.application.episodes.session import AgentSession
from rollgrad.application.episodes.stop_text import StopText
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import (
    RESULT_CHARACTERS,
    Message,
    ParsedReply,
    ReplyForm,
    assistant_message,
    with_system,
)
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.environment import Tool
from rollgrad.domain.ports.rollout_engine import RolloutEngine

Tools = Callable[[], Awaitable[Sequence[Tool]]]
"""Function that opens the tools; it is called once."""
SEED_BITS = 62
"""Bits of a seed that is drawn: engines have seeds of 63, and the turns of an answer count on from its seed."""


class Assistant:
    """Answers with tools of its own.

    Args:
        engine: samples.
        codec: converts messages to tokens and back.
        tools: the tools of the model.
        params: sampling settings.
        draws_seeds: each answer has a seed of its own, unless its request names one; otherwise it has that of `params`.
        system_prompt: put before conversations that have none.
        max_turns: replies (calls of tools included) for one answer.
        max_tokens: tokens of a conversation at most; None for no limit. A reply that would exceed it is truncated.
        max_result_chars: characters of a tool's answer at most, as for `ToolEnvironment`.
        read_image: reads images, as for `ToolEnvironment`; None if neither messages nor answers of tools may have any.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        codec: ChatCodec,
        tools: Tools,
        *,
        params: SamplingParams,
        draws_seeds: bool = False,
        system_prompt: str | None = None,
        max_turns: int = 8,
        max_tokens: int | None = None,
        max_result_chars: int = RESULT_CHARACTERS,
        read_image: Callable[[Any], bytes] | None = None,
    ) -> None:
        self.service = ChatService(engine, codec, max_tokens=max_tokens)
        self._codec = codec
        self._tools = tools
        self._params = params
        self._draws_seeds = draws_seeds
        self._system_prompt = system_prompt
        self._max_result_chars = max_result_chars
        self._read_image = read_image
        self.sees_images = read_image is not None
        """Whether messages, and answers of tools, may have images."""
        self._runtime = AgentRuntime(
            engine, codec, max_turns=max_turns, max_tokens=max_tokens, renderer=self.service.renderer
        )

    def conversation(self, messages: Sequence[Message] = ()) -> "Conversation":
        """Returns a new conversation, which continues after `messages`."""
        return Conversation(self, TokenLedger(self._codec), messages)

    async def answer(self, request: ChatRequest, on_piece: OnPiece | None = None) -> ChatReply:
        """Answers a conversation that a client keeps, or continues a plain text. A client with tools of its own gets
        one reply, and runs them itself; otherwise the assistant runs its tools, and returns only the answer. If turns
        or tokens end before there is one, the last reply is returned without its calls, as truncated.

        Raises:
            DataError: the template refuses the messages.
            RefusedError: the conversation is too long, or too many requests are in flight.
        """
        defaults = self._defaults()
        if request.prompt is not None:
            return await self.service.reply(request, defaults, on_piece=on_piece)
        if request.tools or not await self._tools():
            messages = with_system(request.messages, self._system_prompt)
            return await self.service.reply(evolve(request, messages=messages), defaults, on_piece=on_piece)
        params = request.params(defaults)
        if self.service.max_tokens is not None:
            check_length(request, self.service.max_tokens)
        with self.service.place():
            world = await self.world()
            try:
                turns, _ = await self.play(world, request.messages, TokenLedger(self._codec), params, form=request.form)
            finally:
                await world.close()
        last = turns[-1]
        message, generation = last.action.message, last.action.generation
        if (answer := last.result.info.get("answer")) is not None:
            message = assistant_message(str(answer))
        elif last.stop_reason is not None and last.stop_reason.truncated:  # the client has none of the tools it calls
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            generation = evolve(generation, stop_reason=last.stop_reason)
        reply = ChatReply(
            parsed=ParsedReply(message=message),
            generation=generation,
            prompt_token_ids=last.prompt_token_ids,
            earlier=(
                sum(len(turn.prompt_token_ids) for turn in turns[:-1]),
                sum(len(turn.action.generation.token_ids) for turn in turns[:-1]),
            ),
        )
        if request.stops:
            reply = StopText(request.stops).finish(reply)
        if on_piece is not None:
            on_piece("content", str(reply.parsed.message["content"]))
        return reply

    async def world(self) -> ToolEnvironment:
        """Returns an environment of the tools, whose owner closes it: what tools keep lasts until then."""
        return ToolEnvironment(
            await self._tools(),
            system_prompt=self._system_prompt,
            read_image=self._read_image,
            max_result_chars=self._max_result_chars,
        )

    async def play(
        self,
        world: ToolEnvironment,
        messages: Sequence[Message],
        ledger: TokenLedger,
        params: SamplingParams | None = None,
        *,
        form: ReplyForm | None = None,
        on_piece: OnPiece | None = None,
        on_turn: Callable[[PlayedTurn], None] = lambda turn: None,
    ) -> tuple[list[PlayedTurn], list[Message]]:
        """Plays in `world` from `messages` to an answer, in a form if one is given; returns the turns and the
        conversation with them.

        Raises:
            RefusedError: there is no room for a reply.
        """
        session = AgentSession(world)
        if form is not None:
            form = evolve(form, calls=tuple(tool.name for tool in world.tools), several=True)
        prompt = Prompt(token_ids=(), text="", messages=tuple(messages))
        turns = []
        async for turn in self._runtime.play(
            session, ledger, prompt, params or self._defaults(), form=form, on_piece=on_piece
        ):
            turns.append(turn)
            on_turn(turn)
        if not turns:
            raise RefusedError("The conversation leaves no room for a reply: start a new one.", "context_length")
        return turns, session.messages or []

    def _defaults(self) -> SamplingParams:
        """Returns the sampling settings of one answer."""
        return evolve(self._params, seed=secrets.randbits(SEED_BITS)) if self._draws_seeds else self._params


class Conversation:
    """One user's conversation with an `Assistant`, made by `Assistant.conversation`; it has what its tools keep."""

    def __init__(self, assistant: Assistant, ledger: TokenLedger, messages: Sequence[Message]) -> None:
        self._assistant = assistant
        self._ledger = ledger
        self._world: ToolEnvironment | None = None
        self.messages: list[Message] = list(messages)
        """All messages so far, with calls and results."""

    async def say(
        self,
        content: str | list[dict[str, str]],
        *,
        params: SamplingParams | None = None,
        on_piece: OnPiece | None = None,
        on_turn: Callable[[PlayedTurn], None] = lambda turn: None,
    ) -> PlayedTurn:
        """Adds a user's message, a text or parts with images, and returns the turn that answers it.

        `on_piece` is called with pieces of replies as they are sampled, `on_turn` with each turn when its tools have
        answered. A message that is cancelled or fails leaves the conversation unchanged.
        """
        if self._world is None:
            self._world = await self._assistant.world()
        asked = [*self.messages, {"role": "user", "content": content}]
        turns, self.messages = await self._assistant.play(
            self._world, asked, self._ledger, params, on_piece=on_piece, on_turn=on_turn
        )
        return turns[-1]

    async def close(self) -> None:
        """Removes what its tools keep."""
        if self._world is not None:
            await self._world.close()
