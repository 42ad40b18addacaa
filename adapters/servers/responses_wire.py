"""OpenAI's `POST /v1/responses`: items in, items and their events out.

Nothing is stored here: the server puts the conversation of an earlier response before a request that names it
(`kept_responses.py`). Items of one reply (reasoning,
message, calls) are one assistant message, as on the other wires, so that all play the same sessions.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define, field

from rollgrad.adapters.servers.content import content_of, text_of
from rollgrad.adapters.servers.guard import HttpError, error_body, error_type
from rollgrad.adapters.servers.openai_wire import KEEP_ALIVE, MOST_LIKELY, told_logprobs
from rollgrad.adapters.servers.sampling_fields import read_all, refuse_others, sampling_of
from rollgrad.adapters.servers.wire import (
    OPENAI_FIELDS,
    Call,
    Decode,
    EventStream,
    Wire,
    arguments_of,
    bad,
    call_of,
    calls_of,
    count,
    each,
    named_event,
    read,
    text_schema,
    tool_of,
    tools_and_form,
    usage_of,
)
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import Message, call_entry

LOGPROBS = "message.output_text.logprobs"
"""Name in `include` by which a client asks for log-probs."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",)}
"""Settings with the values that change nothing; any other is refused."""
STORED = ("conversation", "prompt")
"""Settings that name what no server of rollgrad keeps."""
COMPLETED = "completed"
TEXTS = ("input_text", "output_text", "text")
ROLES = ("system", "developer", "user", "assistant")


class ResponsesWire(Wire):
    """The `Wire` of OpenAI's responses."""

    fields = OPENAI_FIELDS.union(
        NEUTRAL,
        STORED,
        ("input", "instructions", "max_output_tokens", "text", "include", "reasoning", "store", "previous_response_id"),
    )

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses the body of a response."""
        settings = read_all(
            lambda: refuse_others(body, NEUTRAL),
            *(partial(_refuse_stored, body, name) for name in STORED),
            lambda: read(body, "include", list),
            lambda: read(body, "store", bool),
            **sampling_of(body, "max_output_tokens"),
            top_logprobs=lambda: count(body, "top_logprobs", 0, MOST_LIKELY),
        )
        described = read(read(body, "text", dict, {}), "format", dict, {"type": "text"})
        tools, form = tools_and_form(body, _tool, text_schema(described, "text.format"))
        instructions = read(body, "instructions", str, "")
        items = read(body, "input", (str, list))
        if not items:
            told = "input is missing: give a text, or the items of the conversation so far."
            raise bad(told, "missing_messages", param="input")
        messages = [{"role": "user", "content": items}] if isinstance(items, str) else _messages(items)
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        return call_of(body, settings, messages=messages, tools=tools, form=form)

    def encode(self, call: Call, replies: Sequence[ChatReply], call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns a `response`."""
        (reply,) = replies
        message = reply.parsed.message
        output = []
        if message.get("reasoning_content"):
            status = COMPLETED if message.get("content") else _status(reply)
            output.append(_reasoning(call_id, message["reasoning_content"], status))
        calls = calls_of(message)
        if message.get("content") or not calls:
            text = str(message.get("content") or "")
            output.append(_said(call_id, text, _status(reply), _told(call, reply, decode)))
        output += [_called(*one) for one in calls]
        return _response(call, call_id, output, reply)

    def events(self, call: Call, call_id: str) -> EventStream:
        """Returns the stream of a response's events."""
        return _Events(call, call_id)

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns an error body in OpenAI's form."""
        return error_body(error)


class _Events(EventStream):
    def __init__(self, call: Call, call_id: str) -> None:
        self._call, self._id = call, call_id
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None
        """The field whose item is open: `content` or `reasoning_content`."""
        self._text = ""

    def start(self, read: int) -> Iterator[str]:
        begun = _response(self._call, self._id, [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def piece(self, field: str, text: str, choice: int) -> Iterator[str]:
        if self._open != field:
            yield from self._close()
            yield from self._begin(field)
        self._text += text
        extra: dict[str, Any] = {"logprobs": []} if field == "content" else {}
        yield self._part_event("delta", delta=text, **extra)

    def finish(self, replies: Sequence[ChatReply], decode: Decode) -> Iterator[str]:
        (reply,) = replies
        ended = _status(reply), _told(self._call, reply, decode)
        yield from self._close(*ended)
        calls = calls_of(reply.parsed.message)
        if not calls and not any(item["type"] == "message" for item in self._output):
            yield from self._begin("content")
            yield from self._close(*ended)
        for one in calls:
            item = _called(*one)
            place = len(self._output)
            self._output.append(item)
            where = {"item_id": item["id"], "output_index": place}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **where, **done)
            yield self._event("response.output_item.done", output_index=place, item=item)
        whole = _response(self._call, self._id, self._output, reply)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: HttpError) -> Iterator[str]:
        failed = _response(self._call, self._id, self._output, None)
        told = {"code": "server_error", "message": f"{error_type(error)}: {error.detail}"}
        yield self._event("response.failed", response={**failed, "status": "failed", "error": told})

    def keep_alive(self) -> str:
        return KEEP_ALIVE

    def _begin(self, field: str) -> Iterator[str]:
        self._open, self._text = field, ""
        item = {**_item(self._id, field, ""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._part_added("added", _item(self._id, field, ""))

    def _close(self, status: str = COMPLETED, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
        if self._open is None:
            return
        item = _item(self._id, self._open, self._text, status, logprobs)
        extra: dict[str, Any] = {"logprobs": list(logprobs)} if self._open == "content" else {}
        yield self._part_event("done", text=self._text, **extra)
        yield self._part_added("done", item)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _part_added(self, what: str, item: Mapping[str, Any]) -> str:
        where = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.content_part.{what}", **where, part=item["content"][0])

    def _part_event(self, what: str, **fields: Any) -> str:
        assert self._open is not None
        kind = "output_text" if self._open == "content" else "reasoning_text"
        where = {"item_id": _item_id(self._id, self._open), "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{kind}.{what}", **where, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return named_event(kind, sequence_number=self._number, **fields)


def _response(call: Call, call_id: str, output: Sequence[Mapping[str, Any]], reply: ChatReply | None) -> dict[str, Any]:
    """Returns the response object; without a reply the one of its beginning."""
    status, usage = "in_progress", None
    if reply is not None:
        status = _status(reply)
        read_tokens, written = usage_of([reply], 1)
        usage = {
            "input_tokens": read_tokens,
            "input_tokens_details": {"cached_tokens": reply.generation.kept or 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read_tokens + written,
        }
    body = call.body
    answer = {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": call.model,
        "output": list(output),
        "usage": usage,
        "store": body.get("store") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
    }
    if reply is not None and body.get("return_token_ids"):
        answer["prompt_token_ids"] = list(reply.prompt_token_ids)
        answer["token_ids"] = list(reply.generation.token_ids)
    return answer


def _item_id(call_id: str, field: str) -> str:
    return f"{'msg' if field == 'content' else 'rs'}_{call_id}"


def _status(reply: ChatReply) -> str:
    return COMPLETED if reply.generation.stop_reason is StopReason.STOP else "incomplete"


def _told(call: Call, reply: ChatReply, decode: Decode) -> list[dict[str, Any]]:
    """Returns the log-probs of a reply's tokens, none if the client has not asked for them."""
    asked = LOGPROBS in (call.body.get("include") or ()) or call.body.get("top_logprobs")
    return told_logprobs(reply, decode) if asked else []


def _item(
    call_id: str,
    field: str,
    text: str,
    status: str = COMPLETED,
    logprobs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    return _said(call_id, text, status, logprobs) if field == "content" else _reasoning(call_id, text, status)


def _said(call_id: str, text: str, status: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}]
    head = {"type": "message", "id": _item_id(call_id, "content"), "role": "assistant", "status": status}
    return {**head, "content": content}


def _reasoning(call_id: str, text: str, status: str = COMPLETED) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    head = {"type": "reasoning", "id": _item_id(call_id, "reasoning_content"), "summary": [], "status": status}
    return {**head, "content": content}


def _called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    head = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "status": COMPLETED}
    return {**head, "name": name, "arguments": arguments}


def _messages(items: Sequence[Any]) -> list[Message]:
    """Returns the conversation of input items; those of one reply become one message."""
    conversation = _Conversation()
    each("input", items, conversation.add)
    return conversation.messages


@define
class _Conversation:
    """The messages of the input items that were read so far."""

    messages: list[Any] = field(factory=list)
    _names: dict[str, str] = field(factory=dict)
    """Names of the functions that were called, by the ids of the calls."""

    def add(self, item: Any, index: int) -> None:
        """Reads an item: it becomes a message, or a part of the last one."""
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad(f"{where} must be an object.")
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") in ROLES:
            self._add_message(item, where)
        elif kind == "reasoning":
            thought = text_of(read(item, "content", list, []), f"{where}.content", ("reasoning_text",))
            if thought:
                self._reply(without=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thought
        elif kind == "function_call":
            call_id, name = read(item, "call_id", str, ""), read(item, "name", str, "")
            self._names[call_id] = name
            entry = call_entry(call_id, name, arguments_of(item.get("arguments") or "{}"))
            self._reply(without=()).setdefault("tool_calls", []).append(entry)
        elif kind == "function_call_output":
            call_id = read(item, "call_id", str, "")
            content = content_of(item.get("output"), f"{where}.output", TEXTS)
            name = self._names.get(call_id, "")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
        else:
            raise bad(
                f"{where} is of type {kind!r}, but this model reads messages, reasoning, calls and their outputs."
            )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = "system" if item["role"] == "developer" else item["role"]
        if role == "assistant":
            text = text_of(item.get("content"), f"{where}.content", TEXTS)
            self._reply(without=("content", "tool_calls"))["content"] = text
        else:
            reads = content_of if role == "user" else text_of
            self.messages.append({"role": role, "content": reads(item.get("content"), f"{where}.content", TEXTS)})

    def _reply(self, *, without: Sequence[str]) -> dict[str, Any]:
        """Returns the assistant message that an item belongs to: the last message if it is one `without` these fields,
        else a new one."""
        last: dict[str, Any] | None = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in without):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _refuse_stored(body: Mapping[str, Any], name: str) -> None:
    if body.get(name) is not None:
        raise bad(
            f"{name} is set, but no server of rollgrad keeps any: send the whole conversation as input, or a "
            "previous_response_id.",
            param=name,
        )


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise bad(
            f"tools[{index}] must be of type function, with a name: tools that run at the server are not offered."
        )
    return tool_of(tool, "parameters")
