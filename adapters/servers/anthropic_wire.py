"""Anthropic's `POST /v1/messages`: bodies, events and errors.

Thinking, tool use and tool results are mapped to the same conversation as on OpenAI's wire, so that both play the same
sessions. Of documents plain text is read; others, and server-side tools, are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from rollgrad.adapters.servers.content import content_of, text_of
from rollgrad.adapters.servers.guard import HttpError, error_type
from rollgrad.adapters.servers.sampling_fields import read_all, stops, temperature
from rollgrad.adapters.servers.wire import (
    FIELDS,
    Call,
    Decode,
    EventStream,
    Wire,
    arguments_of,
    bad,
    call_of,
    calls_of,
    count,
    form_of,
    messages_of,
    named_event,
    number,
    read,
    schema_of,
    tool_of,
)
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import Message, call_entry

SIGNATURE = "unsigned"
"""Signature of thinking; some clients return thinking with an empty signature as text."""


class AnthropicWire(Wire):
    """The `Wire` of Anthropic's messages. Conversations that it only `counts` may end with a reply."""

    fields = FIELDS | {"messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "output_config"}

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses the body of a message request."""
        settings = read_all(
            temperature=lambda: temperature(body, 1),
            top_p=lambda: number(body, "top_p", 1e-6, 1),
            top_k=lambda: count(body, "top_k", 0),
            max_new_tokens=lambda: count(body, "max_tokens"),
            stop_strings=lambda: stops(body, "stop_sequences"),
        )
        messages = messages_of(body)
        choice = read(body, "tool_choice", dict, {"type": "auto"})
        if choice.get("type") not in ("auto", "any", "tool", "none"):
            raise bad(f"tool_choice is of type {choice.get('type')!r}, but it must be auto, any, tool or none.")
        given = [] if choice["type"] == "none" else read(body, "tools", list, [])
        tools = [_tool(tool, index) for index, tool in enumerate(given)]
        form = form_of(
            tools,
            schema=_schema(body),
            required=choice["type"] == "any",
            name=read(choice, "name", str, "") if choice["type"] == "tool" else None,
            several=not read(choice, "disable_parallel_tool_use", bool, False),
        )
        system = text_of(body.get("system"), "system")
        conversation: list[Message] = [{"role": "system", "content": system}] if system else []
        names: dict[str, str] = {}
        for index, message in enumerate(messages):
            conversation += _messages(message, index, names)
        if conversation[-1]["role"] == "assistant" and not self._counts:
            raise bad("messages ends with the assistant's, which this server does not continue: end with the user's.")
        return call_of(body, settings, messages=conversation, tools=tools, form=form)

    def encode(self, call: Call, replies: Sequence[ChatReply], call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns a `message`."""
        (reply,) = replies
        message = reply.parsed.message
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": SIGNATURE})
        if message.get("content"):
            blocks.append({"type": "text", "text": message["content"]})
        for use_id, name, arguments in calls_of(message):
            blocks.append({"type": "tool_use", "id": use_id, "name": name, "input": json.loads(arguments)})
        return {**_head(call, call_id), "content": blocks, **_end(reply), "usage": _usage(reply)}

    def events(self, call: Call, call_id: str) -> EventStream:
        """Returns the stream of message events, each with its name."""
        return _Events(call, call_id)

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns an error body in Anthropic's form."""
        return {"type": "error", "error": {"type": error_type(error), "message": error.detail}}


class _Events(EventStream):
    def __init__(self, call: Call, call_id: str) -> None:
        self._call, self._id = call, call_id
        self._block = -1
        self._open: str | None = None

    def start(self, read: int) -> Iterator[str]:
        usage = {"input_tokens": read, "output_tokens": 0}
        head = {**_head(self._call, self._id), "content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event("message_start", message={**head, "usage": usage})

    def piece(self, field: str, text: str, choice: int) -> Iterator[str]:
        kind = "text" if field == "content" else "thinking"
        if self._open != kind:
            yield from self._close()
            empty = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
            yield self._begin(kind, empty)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def finish(self, replies: Sequence[ChatReply], decode: Decode) -> Iterator[str]:
        (reply,) = replies
        yield from self._close()
        for use_id, name, arguments in calls_of(reply.parsed.message):
            yield self._begin("tool_use", {"type": "tool_use", "id": use_id, "name": name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield from self._close()
        yield named_event("message_delta", delta=_end(reply), usage=_usage(reply))
        yield named_event("message_stop")

    def failed(self, error: HttpError) -> Iterator[str]:
        yield named_event("error", error=AnthropicWire().error(error)["error"])

    def keep_alive(self) -> str:
        return named_event("ping")

    def _begin(self, kind: str, block: Mapping[str, Any]) -> str:
        self._block += 1
        self._open = kind
        return named_event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return named_event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
            self._open = None
            yield named_event("content_block_stop", index=self._block)


def _head(call: Call, call_id: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": call.model}


def _end(reply: ChatReply) -> dict[str, Any]:
    if reply.generation.stop_reason is not StopReason.STOP:
        reason = "max_tokens"
    elif reply.parsed.message.get("tool_calls"):
        reason = "tool_use"
    else:
        reason = "end_turn" if reply.stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"input_tokens": reply.read, "output_tokens": reply.sampled}


def _messages(message: Any, index: int, names: dict[str, str]) -> list[Message]:
    """Converts a message of Anthropic's; tool results become messages of their own. `names` maps ids of tool uses to
    tools."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise bad(f"{where} must be an object whose role is user or assistant.")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _Blocks()
    for block in read(message, "content", list, []):
        blocks.add(block, role, where, names)
    converted: dict[str, Any] = {"role": role, "content": content_of(blocks.parts, f"{where}.content")}
    if role != "assistant":
        return [*blocks.results, *([converted] if blocks.parts or not blocks.results else [])]
    if blocks.thoughts:
        converted["reasoning_content"] = "".join(blocks.thoughts)
    if blocks.calls:
        converted["tool_calls"] = blocks.calls
    return [converted]


@define
class _Blocks:
    """The content blocks of a message, converted and sorted by what they are."""

    parts: list[Any] = field(factory=list)
    """Text and images."""
    thoughts: list[str] = field(factory=list)
    calls: list[dict[str, Any]] = field(factory=list)
    results: list[Message] = field(factory=list)
    """Results of tools, each a message."""

    def add(self, block: Any, role: str, where: str, names: dict[str, str]) -> None:
        """Converts a block of a message of `role`; `where` names the message in errors."""
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" or (kind == "image" and role == "user"):
            self.parts.append({**block, "text": read(block, "text", str, "")})
        elif kind == "document" and role == "user" and (text := _plain_text(block)) is not None:
            self.parts.append({"type": "text", "text": text})
        elif kind == "redacted_thinking":
            pass  # only the server that wrote it can read it
        elif kind == "thinking":
            self.thoughts.append(read(block, "thinking", str, ""))
        elif kind == "tool_use" and role == "assistant":
            use_id, name = read(block, "id", str, ""), read(block, "name", str, "")
            names[use_id] = name
            self.calls.append(call_entry(use_id, name, arguments_of(block.get("input") or {})))
        elif kind == "tool_result" and role == "user":
            use_id = read(block, "tool_use_id", str, "")
            result = {"role": "tool", "tool_call_id": use_id, "name": names.get(use_id, "")}
            self.results.append({**result, "content": content_of(block.get("content"), f"{where}.content")})
        else:
            raise bad(
                f"{where} has a block of type {kind!r}, but read are text (also as a document), images, thinking and "
                "tool results, each in messages of its role."
            )


def _plain_text(document: Mapping[str, Any]) -> str | None:
    """Returns the text of a document, with its title and context before it and an empty line after it; None for one
    of another kind."""
    source = document.get("source")
    if not isinstance(source, dict) or source.get("type") != "text" or not isinstance(source.get("data"), str):
        return None
    words = [read(document, name, str, "") for name in ("title", "context")]
    return "\n\n".join([*filter(None, words), source["data"], ""])


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | bool | None:
    described = read(read(body, "output_config", dict, {}), "format", dict)
    if described is None:
        return None
    if described.get("type") != "json_schema":
        raise bad(f"output_config.format is of type {described.get('type')!r}, but it must be json_schema.")
    return schema_of(described, "output_config.format")


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type") not in (None, "custom"):
        raise bad(f"tools[{index}] must have a name and an input_schema: tools that run at the server are not offered.")
    return tool_of(tool, "input_schema")
