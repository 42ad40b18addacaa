"""OpenAI's `POST /v1/chat/completions`: bodies, chunks and errors.

Settings that are not supported (several choices, forced calls, images, response schemas, penalties) are refused with
one sentence, not ignored. `return_token_ids` adds the token ids of prompt and reply, as vLLM does.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollgrad.adapters.servers.guard import HttpError, error_body
from rollgrad.adapters.servers.wire import (
    Call,
    Decode,
    EventStream,
    Wire,
    arguments_of,
    bad,
    call_of,
    calls_of,
    count,
    messages_of,
    number,
    read,
    stops,
    temperature,
    text_of,
    tool_of,
)
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import Message, call_entry

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Settings with the values that change nothing; any other is refused."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


class OpenAIWire(Wire):
    """The `Wire` of OpenAI's chat completions."""

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses the body of a chat completion."""
        for name, values in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in values:
                raise bad(f"{name} is {json.dumps(body[name])[:60]}, which this server cannot do: leave {name} out.")
        messages = messages_of(body)
        tools = read(body, "tools", list, [])
        if body.get("tool_choice") == "none":
            tools = []
        settings: dict[str, Any] = {
            "temperature": temperature(body, 2),
            "top_p": number(body, "top_p", 1e-6, 1),
            "top_k": count(body, "top_k", -1),
            "max_new_tokens": count(body, "max_completion_tokens") or count(body, "max_tokens"),
            "seed": count(body, "seed", -(2**63), 2**63 - 1),
            "stop_strings": stops(body, "stop"),
        }
        if settings["seed"] is not None:
            settings["seed"] %= 2**63
        if settings["top_k"] is not None:
            settings["top_k"] = max(0, settings["top_k"])
        conversation = [_message(message, index) for index, message in enumerate(messages)]
        return call_of(body, conversation, [_tool(tool, index) for index, tool in enumerate(tools)], settings)

    def encode(self, call: Call, reply: ChatReply, call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns a `chat.completion`."""
        choice: dict[str, Any] = {
            "index": 0,
            "message": _outgoing(reply.parsed.message),
            "finish_reason": _finish_reason(reply),
            "logprobs": _logprobs(reply, decode) if call.body.get("logprobs") else None,
        }
        answer = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [choice],
            "usage": _usage(reply),
        }
        if call.body.get("return_token_ids"):
            answer["prompt_token_ids"] = list(reply.prompt_token_ids)
            choice["token_ids"] = list(reply.generation.token_ids)
        return answer

    def events(self, call: Call, call_id: str) -> EventStream:
        """Returns the stream of `chat.completion.chunk` events."""
        return _Chunks(call, call_id)

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns an error body in OpenAI's form."""
        return error_body(error)


class _Chunks(EventStream):
    def __init__(self, call: Call, call_id: str) -> None:
        self._call = call
        self._head = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
        }
        options = call.body.get("stream_options") or {}
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def start(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, field: str, text: str) -> Iterator[str]:
        yield self._chunk({field: text})

    def finish(self, reply: ChatReply, decode: Decode) -> Iterator[str]:
        calls = _outgoing_calls(reply.parsed.message)
        if calls:
            yield self._chunk({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        extra: dict[str, Any] = {}
        if self._call.body.get("logprobs"):
            extra["logprobs"] = _logprobs(reply, decode)
        if self._call.body.get("return_token_ids"):
            extra["token_ids"] = list(reply.generation.token_ids)
        yield self._chunk({}, finish_reason=_finish_reason(reply), **extra)
        if self._usage:
            yield _event({**self._head, "choices": [], "usage": _usage(reply)})
        yield "data: [DONE]\n\n"

    def failed(self, error: HttpError) -> Iterator[str]:
        yield _event(OpenAIWire().error(error))

    def keep_alive(self) -> str:
        return ": keep-alive\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, **extra: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **extra}
        return _event({**self._head, "choices": [choice]})


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in KNOWN_ROLES:
        raise bad(f"{where} must be an object whose role is one of {', '.join(KNOWN_ROLES)}.")
    role = "system" if message["role"] == "developer" else message["role"]
    result: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call, where) for call in read(message, "tool_calls", list)]
    for name in ("tool_call_id", "name", "reasoning_content"):
        value = read(message, name, str)
        if value:
            result[name] = value
    return result


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where}.tool_calls has a call without function.name.")
    return call_entry(str(call.get("id", "")), function["name"], arguments_of(function.get("arguments") or "{}"))


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"tools[{index}] must be of type function, with function.name: there are no others here.")
    return tool_of(function, "parameters")


def _outgoing(message: Message) -> dict[str, Any]:
    calls = _outgoing_calls(message)
    result: dict[str, Any] = {"role": "assistant", "content": message.get("content") or (None if calls else "")}
    if calls:
        result["tool_calls"] = calls
    if message.get("reasoning_content"):
        result["reasoning_content"] = message["reasoning_content"]
    return result


def _outgoing_calls(message: Message) -> list[dict[str, Any]]:
    return [call_entry(*call) for call in calls_of(message)]


def _finish_reason(reply: ChatReply) -> str:
    if reply.generation.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.parsed.message.get("tool_calls") else "stop"


def _usage(reply: ChatReply) -> dict[str, int]:
    prompt, completion = len(reply.prompt_token_ids), len(reply.generation.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(reply: ChatReply, decode: Decode) -> dict[str, Any]:
    pairs = zip(reply.generation.token_ids, reply.generation.logprobs, strict=True)
    content = []
    for token_id, logprob in pairs:
        text = decode([token_id])
        part = "\ufffd" in text  # a part of a character, whose bytes are not known here
        read_as = None if part else list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": read_as, "top_logprobs": []})
    return {"content": content}
