"""Anthropic's messages: what a body means, what is refused, and how answers and errors look."""

import json
from typing import Any

import pytest

from rollgrad.adapters.servers.anthropic_wire import SIGNATURE, AnthropicWire
from rollgrad.adapters.servers.guard import HttpError
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import ParsedReply, ReplyForm

HI: Any = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
WIRE = AnthropicWire()


def reply(reason: StopReason = StopReason.STOP, stopped_by: str | None = None, **message: Any) -> ChatReply:
    generation = Generation(token_ids=[65, 66], logprobs=[-0.5, -0.25], versions=[0, 0], stop_reason=reason)
    parsed = ParsedReply(message={"role": "assistant", "content": "", **message})
    return ChatReply(parsed=parsed, generation=generation, prompt_token_ids=(1, 2, 3), stopped_by=stopped_by)


def decode(token_ids: Any) -> str:
    return bytes(token_ids).decode()


def test_a_conversation_becomes_ours() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    assistant = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Look:"}, use]
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "text", "text": "and now?"},
    ]
    messages = [*HI, {"role": "assistant", "content": assistant}, {"role": "user", "content": results}]
    read = WIRE.decode(
        {
            "messages": messages,
            "system": [cached],
            "max_tokens": 9,
            "temperature": 1,
            "top_k": 4,
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
        }
    ).request
    assert read.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "name": "", "content": ""},
        {"role": "user", "content": "and now?"},
    ]
    assert read.tools == [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    ]
    assert read.changes == {"max_new_tokens": 9, "temperature": 1.0, "top_k": 4, "stop_strings": ("x",)}


def test_documents_of_plain_text_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The grass is green."}
    document = {"type": "document", "source": source, "title": "Grass", "citations": {"enabled": True}}
    content = [document, {"type": "text", "text": "What is green?"}]
    (message,) = WIRE.decode({"messages": [{"role": "user", "content": content}]}).request.messages
    assert message == {"role": "user", "content": "Grass\n\nThe grass is green.\n\nWhat is green?"}


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "of type None"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image without its content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]}, "'document'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "'tool_result'"),
        ({"system": 3}, "system"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "some"}}, "'some'"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f", "input_schema": {}}]}, "names 'g'"),
        ({"output_config": {"format": {"type": "json"}}}, "'json'"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "input_schema"),
        ({"temperature": 1.5}, "temperature is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_sequences": [3]}, "stop_sequences"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(HttpError, match=named) as refused:
        WIRE.decode({"messages": HI, **more})
    assert refused.value.status_code == 400


def test_the_form_that_is_asked_for() -> None:
    def form(**more: Any) -> ReplyForm | None:
        tools = [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]
        return WIRE.decode({"messages": HI, "tools": tools, **more}).request.form

    assert form() is None
    assert form(tool_choice={"type": "any"}) == ReplyForm(calls=("f", "g"), several=True)
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert form(tool_choice=one) == ReplyForm(calls=("f", "g"))
    assert form(tool_choice={"type": "tool", "name": "g"}) == ReplyForm(calls=("g",))
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert form(output_config=schema, tools=[]) == ReplyForm(schema={"type": "object"}, several=True)


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (reply(content="x"), "end_turn", None),
        (reply(tool_calls=[CALL]), "tool_use", None),
        (reply(StopReason.LENGTH, tool_calls=[CALL]), "max_tokens", None),
        (reply(content="x", stopped_by="END"), "stop_sequence", "END"),
    ],
)
def test_why_an_answer_ends(answer: ChatReply, reason: str, sequence: str | None) -> None:
    body = WIRE.encode(WIRE.decode({"messages": HI}), [answer], "x", decode)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert body["usage"] == {"input_tokens": 3, "output_tokens": 2}


def test_an_answer_and_its_events_say_the_same() -> None:
    answer = reply(content="hi", reasoning_content="hm", tool_calls=[CALL])
    call = WIRE.decode({"messages": HI, "model": "m", "stream": True})
    body = WIRE.encode(call, [answer], "x", decode)
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": SIGNATURE},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    events = WIRE.events(call, "x")
    pieces = [("reasoning_content", "h"), ("reasoning_content", "m"), ("content", "h"), ("content", "i")]
    written = [*events.start(7)]
    for piece in pieces:
        written += events.piece(*piece, 0)
    written += events.finish([answer], decode)
    values = []
    for event in written:
        name, data = event.removesuffix("\n\n").split("\n")
        values.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {values[-1]['type']}"
    blocks: list[dict[str, Any]] = []
    for value in values:
        if value["type"] == "content_block_start":
            assert value["index"] == len(blocks)
            blocks.append({**value["content_block"], "json": ""})
        elif value["type"] == "content_block_delta":
            delta = dict(value["delta"])
            kind = delta.pop("type")
            ((key, text),) = delta.items()
            blocks[value["index"]]["json" if kind == "input_json_delta" else key] += text
    for block in blocks:
        text = block.pop("json")
        if text:
            block["input"] = json.loads(text)
    assert blocks == body["content"]
    assert [value["type"] for value in values].count("content_block_stop") == 3
    assert [value["type"] for value in values[-2:]] == ["message_delta", "message_stop"]
    assert values[-2]["usage"] == body["usage"]
    assert values[0]["message"]["model"] == "m"
    assert values[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}


def test_a_history_of_another_server_is_read_without_what_only_that_can_read() -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "hello"}]
    read = WIRE.decode({"messages": [*HI, {"role": "assistant", "content": blocks}, *HI]}).request
    assert read.messages[1] == {"role": "assistant", "content": "hello"}


def test_a_reply_that_the_client_has_begun_is_refused() -> None:
    begun = {"messages": [*HI, {"role": "assistant", "content": "hell"}]}
    with pytest.raises(HttpError, match="end with the user's"):
        WIRE.decode(begun)
    assert len(AnthropicWire(counts=True).decode(begun).request.messages) == 2


def test_errors() -> None:
    events = WIRE.events(WIRE.decode({"messages": HI}), "x")
    (failed,) = events.failed(HttpError(503, "Down."))
    wanted = {"type": "error", "error": {"type": "overloaded_error", "message": "Down."}}
    assert json.loads(failed.split("data: ")[1]) == wanted
    assert WIRE.error(HttpError(410, "Over."))["error"]["type"] == "invalid_request_error"
    assert WIRE.error(HttpError(500, "?"))["error"]["type"] == "api_error"
    assert events.keep_alive() == 'event: ping\ndata: {"type": "ping"}\n\n'
