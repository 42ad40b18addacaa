"""Chat messages, the tool calls in them, and one turn of the policy.

A message is a mapping in the OpenAI shape, with two conventions of Hugging Face templates: the arguments of a tool call
are a mapping (not JSON text), and thinking is in `reasoning_content`. A message with `visible` False is for the model
only, and is not shown to users.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby, zip_longest
from typing import Any

from attrs import frozen

from rollgrad.domain.episodes.generation import Generation

Message = Mapping[str, Any]
"""Mapping with `role` and `content`; depending on the role also `tool_calls`, `reasoning_content`, `tool_call_id` and
`name`."""


def texts(value: Any) -> Iterator[str]:
    """Yields every text in a JSON value, keys of mappings too."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, (dict, Mapping)):  # most are dicts, which take a fifth of the time
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item


@frozen(kw_only=True)
class ToolCall:
    """A tool call of the model. `arguments` is None if they could not be read; `error` then says why."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    error: str | None = None


@frozen(kw_only=True, eq=False)
class Action:
    """One turn of the policy."""

    text: str
    """The decoded reply without special tokens."""
    generation: Generation
    """Its token ids, and why it stopped."""
    message: Message
    """The reply as a chat message."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Its calls in order."""
    error: str | None = None
    """Sentence that says what could not be parsed; None if all could."""


@frozen(kw_only=True)
class ParsedReply:
    """A reply as a message, with its tool calls in order; `error` says what could not be parsed."""

    message: Message
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None


@frozen(kw_only=True)
class ReplyForm:
    """The form that a reply must have, besides thinking before it."""

    schema: Mapping[str, Any] | bool | None = None
    """JSON schema of its text; None allows no text."""
    calls: tuple[str, ...] = ()
    """Names of tools of which it may call one instead of a text; without a schema it must."""
    several: bool = False
    """Whether it may call several."""


IMAGE_MARK = "[image]"
"""Text in a tool's answer that stands for an image."""

RESULT_CHARACTERS = 2**17
"""Default of the most characters of a tool's result that the model is shown, about 32,000 tokens. Tokenising what no
episode has room for, such as a file of a gigabyte, would hold up all others."""


@frozen(kw_only=True)
class ToolResult:
    """Answer of a tool. `images` (paths, data URIs or bytes of files) stand in the places of IMAGE_MARK in the content,
    after it where it has another number of marks; a model that sees none reads the content alone. `terminates`: it
    ends the episode."""

    content: str
    images: Sequence[Any] = ()
    is_error: bool = False
    terminates: bool = False


def assistant_message(content: str, *, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> Message:
    """Returns a reply as a message; calls that could not be read are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [call for call in tool_calls if call.arguments is not None]
    if calls:
        message["tool_calls"] = [call_entry(call.id, call.name, call.arguments) for call in calls]
    return message


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """Returns a conversation after the system message `system`, if that is given and it has none of its own."""
    if system is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def call_entry(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in the form that messages hold."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(call: ToolCall, content: str, images: Sequence[Any] = ()) -> Message:
    """Returns a tool's answer to `call`, with `images` in their places (`ToolResult`)."""
    written = _with_images(content, images) if images else content
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": written}


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the content of a message as a text, with IMAGE_MARK in the place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else IMAGE_MARK for part in content)


def _with_images(content: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    pieces = content.split(IMAGE_MARK)
    if len(pieces) != len(images) + 1:
        pieces = [content] + [""] * len(images)
    parts: list[dict[str, Any]] = []
    for piece, image in zip_longest(pieces, images):
        if piece:
            parts.append({"type": "text", "text": piece})
        if image is not None:
            parts.append({"type": "image", "image": image})
    return parts


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation in which answers to the calls of one message are in the order of these calls.

    Clients add them as tools end, and tell them apart by the calls' ids, which most chat templates do not write: the
    model would take one answer for another's.
    """
    ordered: list[Message] = []
    for answering, part in groupby(messages, lambda message: message["role"] == "tool"):
        told = [*part]
        if answering and ordered:
            places = {call.get("id"): place for place, call in enumerate(ordered[-1].get("tool_calls") or ()) if call}
            told.sort(key=lambda message: places.get(message.get("tool_call_id"), len(places)))
        ordered += told
    return ordered


def same_message(message: Message) -> str:
    """Returns a text that is equal for two messages that say the same: role, visible text, names and arguments of
    calls.

    Ids of calls, the order of keys and thinking are left out, because clients change or drop them when they send a
    history back.
    """
    role, content = message["role"], message.get("content") or ""
    calls = [
        [call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or () if call
    ]
    if isinstance(content, str) and not calls:  # most messages: JSON would take ten times as long
        return f"{role}\0{content}"
    return json.dumps([role, content, calls], sort_keys=True, ensure_ascii=False, default=_short)


def _short(value: Any) -> str:
    """Returns a text of what JSON cannot hold, such as the bytes of an image, which differs between two of them."""
    return sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
