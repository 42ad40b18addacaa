"""OpenAI's chat completions: what a body means, what is refused, and how answers and errors look."""

import json
from typing import Any

import pytest
from attrs import evolve

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.sampling_fields import MAX_STOPS, MIN_TEMPERATURE
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import ParsedReply, ReplyForm

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00fc"}}}
WIRE = OpenAIWire()


def reply(reason: StopReason = StopReason.STOP, **message: Any) -> ChatReply:
    generation = Generation(token_ids=[65, 195], logprobs=[-0.5, -0.25], versions=[0, 0], stop_reason=reason)
    parsed = ParsedReply(message={"role": "assistant", "content": "", **message})
    return ChatReply(parsed=parsed, generation=generation, prompt_token_ids=(1, 2, 3))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A `tool_choice` that allows these tools alone."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def decode(token_ids: Any) -> str:
    return bytes(token_ids).decode(errors="replace")


def test_settings_become_changes() -> None:
    call = WIRE.decode(
        {
            "messages": HI,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "seed": -1,
            "stop": "x",
            "stream": True,
            "model": "m",
        }
    )
    assert call.request.changes == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "max_new_tokens": 6,
        "seed": 2**63 - 1,
        "stop_strings": ("x",),
    }
    assert (call.stream, call.model) == (True, "m")
    assert WIRE.decode({"messages": HI, "temperature": None, "stop": []}).request.changes == {}
    assert WIRE.decode({"messages": HI, "temperature": MIN_TEMPERATURE / 2}).request.changes == {"temperature": 0.0}


def test_messages_become_ours() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "developer", "content": texts},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": None, "name": "eve"},
    ]
    read = WIRE.decode({"messages": messages, "tools": [TOOL]}).request
    assert read.messages == [
        {"role": "system", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": "", "name": "eve"},
    ]
    parameters = {"type": "object", "properties": {}}
    assert read.tools == [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]
    assert WIRE.decode({"messages": HI, "tools": [TOOL], "tool_choice": "none"}).request.tools == []


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "3", "", None, 5, "[" * 5000, "[" * 200 + "]" * 200, '{"a": "\\ud800"}', "1" * 5000]
)
def test_arguments_that_are_no_object_are_kept(arguments: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    (read,) = WIRE.decode({"messages": [message]}).request.messages
    json.dumps(read, ensure_ascii=False).encode()
    kept = read["tool_calls"][0]["function"]["arguments"]
    assert isinstance(kept, dict)
    assert kept == {} or "arguments" in kept


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot"}]}, r"messages\[0\]"),
        ({"messages": [*HI, 3]}, r"messages\[1\]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "an image without its content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, r"function\.name"),
        ({"n": 1000}, "n is 1000"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs"),
        ({"response_format": {"type": "grammar"}}, "response_format is of type 'grammar'"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema\.schema is missing"),
        ({"tool_choice": "required"}, "tool_choice requires a call, but there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "names 'g'"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice allows tools"),
        ({"tool_choice": allowed("auto", "g"), "tools": [TOOL]}, "tool_choice allows tools"),
        ({"tool_choice": allowed("none", "f"), "tools": [TOOL]}, "its mode must be"),
        ({"ignore_eos": True}, "ignore_eos is true"),
        ({"guided_choice": ["a", "b"]}, "guided_choice is"),
        ({"stop_token_ids": [3]}, r"stop_token_ids is \[3\]"),
        ({"web_search_options": {}}, "web_search_options is"),
        ({"continue_final_message": True}, "continue_final_message is true"),
        ({"top_logprobs": 5}, "logprobs is not"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs is 50"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"temperature": 3}, "temperature is 3"),
        ({"temperature": "hot"}, "a whole number or a number"),
        ({"temperature": True}, "temperature is true"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, f"{MAX_STOPS} at most"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "description"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(HttpError, match=named) as refused:
        WIRE.decode({"messages": HI, **more})
    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HI, "temperature": 3}, "temperature"),
        ({"messages": HI, "stop": [""], "seed": 2**63}, "seed"),
        ({"messages": HI, "stop_token_ids": [3]}, "stop_token_ids"),
        ({}, "messages"),
        ({"messages": [*HI, {"role": "robot", "content": ""}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "", "name": 7}]}, "messages[0].name"),
        ({"messages": HI, "tools": [TOOL, {"type": "web_search"}]}, "tools[1]"),
        ({"messages": HI, "tools": [{**TOOL, "function": {"name": "f", "description": 1}}]}, "tools[0].description"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "tool_choice": allowed("auto", "g"), "tools": [TOOL]}, "tool_choice"),
        ({"messages": HI, "response_format": {"type": "grammar"}}, "response_format"),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_refusal_names_the_field_as_openais_do(body: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        WIRE.decode(body)
    assert WIRE.error(refused.value)["error"]["param"] == param


def test_an_answer() -> None:
    call = WIRE.decode({"messages": HI, "model": "m", "logprobs": True, "return_token_ids": True})
    body = WIRE.encode(call, [reply(content="hi", reasoning_content="hm", tool_calls=[CALL])], "x", decode)
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hi",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\u00fc"}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (body["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [65, 195])
    assert [(t["token"], t["logprob"], t["bytes"]) for t in choice["logprobs"]["content"]] == [
        ("A", -0.5, [65]),
        ("\ufffd", -0.25, None),
    ]


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
OTHER: Any = {"type": "function", "function": {"name": "g"}}


def test_tokens_that_the_engine_had_kept_are_told_where_it_says_so() -> None:
    told = evolve(reply(), generation=evolve(reply().generation, kept=2))
    usage = WIRE.encode(WIRE.decode({"messages": HI}), [told], "1", decode)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_the_model_is_shown_the_tools_that_are_allowed() -> None:
    call = WIRE.decode({"messages": HI, "tools": [TOOL, OTHER], "tool_choice": allowed("auto", "g", "other")})
    assert [tool["function"]["name"] for tool in call.request.tools] == ["g"]


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({}, None),
        ({"tools": [TOOL], "tool_choice": "auto"}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ReplyForm(schema={"type": "object"}, several=True)),
        ({"response_format": JSON_SCHEMA}, ReplyForm(schema=SCHEMA, several=True)),
        (
            {"response_format": JSON_SCHEMA, "tools": [TOOL], "parallel_tool_calls": False},
            ReplyForm(schema=SCHEMA, calls=("f",)),
        ),
        (
            {"response_format": JSON_SCHEMA, "tools": [TOOL], "tool_choice": "none"},
            ReplyForm(schema=SCHEMA, several=True),
        ),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, ReplyForm(calls=("f", "g"), several=True)),
        (
            {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            ReplyForm(calls=("g",)),
        ),
        ({"tools": [TOOL, OTHER], "tool_choice": allowed("required", "g")}, ReplyForm(calls=("g",), several=True)),
        ({"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "g")}, None),
    ],
)
def test_the_form_that_is_asked_for(more: dict[str, Any], form: ReplyForm | None) -> None:
    assert WIRE.decode({"messages": HI, **more}).request.form == form


def test_several_choices_and_the_likeliest_tokens() -> None:
    call = WIRE.decode({"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2})
    assert (call.choices, call.request.changes) == (2, {"top_logprobs": 2})
    generation = Generation(
        token_ids=[65, 66],
        logprobs=[-0.5, -0.25],
        versions=[0, 0],
        stop_reason=StopReason.STOP,
        top_logprobs=[[(65, -0.5), (67, -1.0)], [(66, -0.25)]],
    )
    first, second = reply(content="a"), evolve(reply(content="b"), generation=generation)
    body = WIRE.encode(call, [first, second], "x", decode)
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert [[top["token"] for top in one["top_logprobs"]] for one in body["choices"][1]["logprobs"]["content"]] == [
        ["A", "C"],
        ["B"],
    ]
    events = WIRE.events(call, "x")
    written = [*events.start(7), *events.piece("content", "a", 1), *events.finish([first, second], decode)]
    chunks = [json.loads(event[6:])["choices"][0] for event in written[:-1]]
    assert [chunk["index"] for chunk in chunks] == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.ABORTED])
def test_an_answer_that_was_cut_off(reason: StopReason) -> None:
    call = WIRE.decode({"messages": HI})
    body = WIRE.encode(call, [reply(reason)], "x", decode)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == ""
    assert "prompt_token_ids" not in body


def test_chunks() -> None:
    call = WIRE.decode({"messages": HI, "stream": True, "stream_options": {"include_usage": True}})
    events = WIRE.events(call, "x")
    ended = events.finish([reply(tool_calls=[CALL])], decode)
    written = [*events.start(7), *events.piece("content", "a\u2028b", 0), *ended]
    assert all(event.startswith("data: ") and event.endswith("\n\n") and event.count("\n") == 2 for event in written)
    assert written[-1] == "data: [DONE]\n\n"
    first, piece, calls, last, usage = [json.loads(event[6:]) for event in written[:-1]]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert piece["choices"][0]["delta"] == {"content": "a\u2028b"}
    assert calls["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert len({json.loads(event[6:])["id"] for event in written[:-1]}) == 1
    assert events.keep_alive().startswith(":")
    (failed,) = events.failed(HttpError(503, "Down.", code="engine_error"))
    assert json.loads(failed[6:])["error"]["message"] == "Down."


def test_an_error() -> None:
    assert WIRE.error(HttpError(429, "Later.", code="busy")) == {
        "error": {"message": "Later.", "type": "rate_limit_error", "param": None, "code": "busy"}
    }
