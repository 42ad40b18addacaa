"""Answers of an assistant with tools of its own, and the tokens that its client is told."""

from collections.abc import Sequence

import pytest

from rollgrad.application.episodes.assistant import Assistant
from rollgrad.application.episodes.chat_request import ChatRequest, RefusedError
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.ports.environment import Tool
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from rollgrad.testing.tool import FakeTool
from tests.fakes.scripted_engine import ScriptedEngine

CALL = '@repeat {"text": "lost"}'


async def answered(engine: ScriptedEngine, max_turns: int, max_tokens: int | None = None) -> ChatReply:
    async def tools() -> Sequence[Tool]:
        return [FakeTool()]

    params = SamplingParams(max_new_tokens=100)
    assistant = Assistant(engine, FakeChatCodec(), tools, params=params, max_turns=max_turns, max_tokens=max_tokens)
    return await assistant.answer(ChatRequest(messages=[{"role": "user", "content": "Where is it?"}]))


async def test_a_client_without_tools_gets_no_calls_when_the_turns_are_over() -> None:
    for last in (CALL, "@repeat {", "@other {}"):
        reply = await answered(ScriptedEngine(FakeChatCodec(), EOS, [CALL, last]), max_turns=2)
        assert "tool_calls" not in reply.parsed.message
        assert reply.generation.stop_reason is StopReason.TURN_LIMIT, last


async def test_an_answer_in_the_last_turn_is_whole() -> None:
    reply = await answered(ScriptedEngine(FakeChatCodec(), EOS, [CALL, "It is lost."]), max_turns=2)
    assert reply.parsed.message["content"] == "It is lost."
    assert reply.generation.stop_reason is StopReason.STOP


async def test_the_tokens_of_calls_count_as_the_answers() -> None:
    engine = ScriptedEngine(FakeChatCodec(), EOS, [CALL, CALL, "It is lost."])
    reply = await answered(engine, max_turns=8)
    assert len(engine.said) == 3
    assert reply.read == sum(len(prompt) for prompt, _ in engine.said)
    assert reply.sampled == sum(len(generation.token_ids) for _, generation in engine.said)


async def test_a_conversation_beyond_the_context_is_refused_as_such() -> None:
    engine = ScriptedEngine(FakeChatCodec(), EOS, ["It is lost."])
    with pytest.raises(RefusedError, match="leaves no room for a reply") as refused:
        await answered(engine, max_turns=2, max_tokens=10)
    assert refused.value.kind == "context_length"  # by which clients know that they are to shorten it
