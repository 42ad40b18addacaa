"""What the chat wires share: a decoded call, and reading the fields of a body.

A wire (`adapters.openai.wire`, `adapters.anthropic.wire`) turns a body into a `Call`, and a reply into bodies and
events; it knows nothing of sessions and sockets.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen

from rollgrad.adapters.http.guard import HttpError
from rollgrad.application.agents.reply import ChatReply
from rollgrad.application.agents.service import ChatRequest
from rollgrad.domain.messages import Message

Value = TypeVar("Value")
Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""


@frozen(kw_only=True, eq=False)
class Call:
    """A decoded body. `body` is kept for what only the wire's own answer depends on."""

    request: ChatRequest
    model: str
    stream: bool
    body: Mapping[str, Any]


class Wire(Protocol):
    """One protocol. All ids of an answer are made from `call_id`."""

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Reads a body.

        Raises:
            HttpError: 400, with what is wrong and where.
        """
        ...

    def encode(self, call: Call, reply: ChatReply, call_id: str, decode: Decode) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        ...

    def events(self, call: Call, call_id: str) -> "EventStream":
        """The answer to a call that streams."""
        ...

    def error(self, error: HttpError) -> dict[str, Any]:
        """The body of a refusal."""
        ...


class EventStream(Protocol):
    """Server-sent events of one answer, as text."""

    def start(self) -> Iterator[str]:
        """Before the first token."""
        ...

    def piece(self, field: str, text: str) -> Iterator[str]:
        """A piece of `content` or `reasoning_content`."""
        ...

    def finish(self, reply: ChatReply, decode: Decode) -> Iterator[str]:
        """Calls, why it stopped, usage, and the end."""
        ...

    def failed(self, error: HttpError) -> Iterator[str]:
        """The answer broke off."""
        ...

    def keep_alive(self) -> str:
        """Says that the server is still there."""
        ...


def bad(message: str, code: str = "invalid_value") -> HttpError:
    """400."""
    return HttpError(400, message, code=code)


def read(body: Mapping[str, Any], name: str, kind: type[Value] | tuple[type, ...], default: Any = None) -> Any:
    """A field of the body, None and absent alike being `default`.

    Raises:
        HttpError: it has another type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(NAMES.get(one, one.__name__) for one in kinds)
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be {expected}.")
    return value


NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number in a closed range, None if absent."""
    value = read(body, name, (int, float))
    if value is not None and not low <= value <= high:
        raise bad(f"{name} is {value}, but it must be from {low:g} to {high:g}.")
    return None if value is None else float(value)


def count(body: Mapping[str, Any], name: str, low: int = 1) -> int | None:
    """A whole number of at least `low`, None if absent."""
    value: int | None = read(body, name, int)
    if value is not None and value < low:
        raise bad(f"{name} is {value}, but it must be at least {low}.")
    return value


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: a text, or a list of text parts.

    Raises:
        HttpError: there is something else in it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} must be a text or a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad(f"{where} has a part of type {kind!r}, but this model reads text only.")
        texts.append(part["text"])
    return "".join(texts)


def arguments_of(text: Any) -> Mapping[str, Any]:
    """The arguments of a call that a client sends back: JSON text of an object. What it is not is kept as it is."""
    if isinstance(text, Mapping):
        return text
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return {"arguments": text}
    return value if isinstance(value, Mapping) else {"arguments": value}


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """(id, name, arguments as JSON text) of a message's calls."""
    return [
        (call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
        for call in message.get("tool_calls") or ()
    ]
