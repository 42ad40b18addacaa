"""OpenAI's responses: what a body means, what is refused, and that an answer and its events say the same."""

import json
from typing import Any

import pytest

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import ParsedReply, ReplyForm

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
WIRE = ResponsesWire()


def reply(reason: StopReason = StopReason.STOP, **message: Any) -> ChatReply:
    generation = Generation(token_ids=[65, 66], logprobs=[-0.5, -0.25], versions=[0, 0], stop_reason=reason)
    parsed = ParsedReply(message={"role": "assistant", "content": "", **message})
    return ChatReply(parsed=parsed, generation=generation, prompt_token_ids=(1, 2, 3))


def test_items_of_a_reply_become_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    other = {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"}
    results = [{"type": "function_call_output", "call_id": i, "output": f"r{i}"} for i in ("2", "1")]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    last = {"role": "assistant", "content": "done"}
    items = [asked, thought, said, call, other, *results, last, last]
    read = WIRE.decode({"input": items, "instructions": "Be brief.", "max_output_tokens": 7}).request
    assert read.changes == {"max_new_tokens": 7}
    assert read.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "r2"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r1"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "done"},
    ]


def test_the_form_that_is_asked_for() -> None:
    schema = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    form = WIRE.decode({"input": "hi", "text": schema, "tools": [TOOL], "parallel_tool_calls": False}).request.form
    assert form == ReplyForm(schema={"type": "object"}, calls=("f",))
    named = {"type": "function", "name": "f"}
    assert WIRE.decode({"input": "hi", "tools": [TOOL], "tool_choice": named}).request.form == ReplyForm(calls=("f",))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    call = WIRE.decode({"input": "hi", "tools": [TOOL, {**TOOL, "name": "g"}], "tool_choice": allowed})
    assert call.request.form == ReplyForm(calls=("f",), several=True)
    assert [tool["function"]["name"] for tool in call.request.tools] == ["f"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"input": None}, "input is missing"),
        ({"input": [3]}, r"input\[0\]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "an image without its content"),
        ({"conversation": "x"}, "conversation is set, but no server of rollgrad keeps any"),
        ({"background": True}, "background is true"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"include": "x"}, "include is"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice is"),
        ({"text": {"format": {"type": "xml"}}}, "'xml'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(HttpError, match=named) as refused:
        WIRE.decode({"input": "hi", **more})
    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": "hi", "conversation": "c"}, "conversation"),
        ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_a_refusal_names_the_field_as_openais_do(body: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        WIRE.decode(body)
    assert WIRE.error(refused.value)["error"]["param"] == param


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (reply(content="hi", reasoning_content="hm", tool_calls=[CALL]), ["reasoning", "message", "function_call"]),
        (reply(content="", tool_calls=[CALL]), ["function_call"]),
        (reply(content=""), ["message"]),
        (reply(StopReason.LENGTH, content="hi"), ["message"]),
        (reply(StopReason.LENGTH, content="", reasoning_content="hm"), ["reasoning", "message"]),
    ],
)
def test_an_answer_and_its_events_say_the_same(answer: ChatReply, kinds: list[str]) -> None:
    """The SDK reads the events, and puts the same response together."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    asked = {"include": ["message.output_text.logprobs"]}
    call = WIRE.decode({"input": "hi", "model": "m", "stream": True, **asked})
    body = WIRE.encode(call, [answer], "x", str)
    whole = Response.model_validate(body, strict=True)
    assert [item.type for item in whole.output] == kinds
    assert whole.status == ("completed" if answer.generation.stop_reason is StopReason.STOP else "incomplete")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (3, 2)  # type: ignore[union-attr]
    for item in whole.output:
        if item.type == "message":
            assert item.status == whole.status
            told = [(each.token, each.logprob) for each in item.content[0].logprobs or ()]  # type: ignore[union-attr]
            assert told == [("[65]", -0.5), ("[66]", -0.25)]
    events = WIRE.events(call, "x")
    written = [*events.start(7)]
    for field in ("reasoning_content", "content"):
        for piece in str(answer.parsed.message.get(field) or ""):
            written += events.piece(field, piece, 0)
    written += events.finish([answer], str)
    values = [json.loads(event.removesuffix("\n\n").split("\n")[1].removeprefix("data: ")) for event in written]
    assert [value["sequence_number"] for value in values] == [*range(len(values))]
    read: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for value in values:
        read.validate_python(value)
    assert values[-1]["type"] == f"response.{whole.status}"
    assert values[-1]["response"]["output"] == body["output"]
    done = [value["item"] for value in values if value["type"] == "response.output_item.done"]
    assert done == body["output"]
    text = "".join(value["delta"] for value in values if value["type"] == "response.output_text.delta")
    assert text == answer.parsed.message["content"]


def test_log_probs_are_told_to_who_asks_for_them() -> None:
    def told(**settings: Any) -> Any:
        call = WIRE.decode({"input": "hi", **settings})
        return call.request.changes, WIRE.encode(call, [reply(content="hi")], "x", str)["output"][0]["content"][0]

    assert told()[1]["logprobs"] == []
    changes, part = told(top_logprobs=2)
    assert changes == {"top_logprobs": 2}
    assert [token["logprob"] for token in part["logprobs"]] == [-0.5, -0.25]


def test_a_stream_that_fails() -> None:
    events = WIRE.events(WIRE.decode({"input": "hi"}), "x")
    list(events.start(7))
    (failed,) = events.failed(HttpError(503, "Down.", code="engine_error"))
    assert '"status": "failed"' in failed
    assert "Down." in failed
