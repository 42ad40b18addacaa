"""Common parts of the chat wires: a decoded call, and parsing the fields of a body.

A wire (`openai_wire`, `anthropic_wire`) turns a body into a `Call`, and a reply into bodies and events. It does not own
sessions and sockets.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen

from rollgrad.adapters.servers.guard import HttpError, check_depth
from rollgrad.application.episodes.chat_service import ChatRequest
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.messages import Message

Value = TypeVar("Value")
MIN_TEMPERATURE = 1e-3
"""Temperature below which sampling is greedy."""
MAX_COUNT = 2**31 - 1
"""Largest number of tokens in a request."""
MAX_STOPS = 64
"""Largest number of stop texts of a request, each of which is searched for after every token."""

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text, special tokens included."""


@frozen(kw_only=True, eq=False)
class Call:
    """A decoded body. `body` is kept for settings that only the wire's answer depends on."""

    request: ChatRequest
    model: str
    stream: bool
    body: Mapping[str, Any]


class Wire(Protocol):
    """One chat protocol. All ids of an answer are made from `call_id`."""

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses a body.

        Raises:
            HttpError: 400; the message says what is wrong and where.
        """
        ...

    def encode(self, call: Call, reply: ChatReply, call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns the answer to a call that does not stream."""
        ...

    def events(self, call: Call, call_id: str) -> "EventStream":
        """Returns the answer to a call that streams."""
        ...

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns the body of a refusal."""
        ...


class EventStream(Protocol):
    """Server-sent events of one answer, as text."""

    def start(self) -> Iterator[str]:
        """Yields the events before the first token."""
        ...

    def piece(self, field: str, text: str) -> Iterator[str]:
        """Yields the events of a piece of `content` or `reasoning_content`."""
        ...

    def finish(self, reply: ChatReply, decode: Decode) -> Iterator[str]:
        """Yields the events of tool calls, stop reason, usage and end."""
        ...

    def failed(self, error: HttpError) -> Iterator[str]:
        """Yields the events of an answer that failed."""
        ...

    def keep_alive(self) -> str:
        """Returns an event that keeps the connection open."""
        ...


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """Returns the conversation so far, as the client wrote it.

    Raises:
        HttpError: there is none.
    """
    messages: list[Any] | None = read(body, "messages", list)
    if not messages:
        raise bad("messages is missing: give the conversation so far.", "missing_messages")
    return messages


def call_of(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Call:
    """Returns the call of a body with parsed parts. `settings` are fields of `SamplingParams`; None keeps the default.

    Raises:
        HttpError: the model's name or `stream` has another type.
    """
    changes = {name: value for name, value in settings.items() if value is not None}
    return Call(
        request=ChatRequest(messages=messages, tools=tools, changes=changes),
        model=read(body, "model", str, ""),
        stream=read(body, "stream", bool, False),
        body=body,
    )


def bad(message: str, code: str = "invalid_value") -> HttpError:
    """Returns a 400."""
    return HttpError(400, message, code=code)


def read(body: Mapping[str, Any], name: str, kind: type[Value] | tuple[type, ...], default: Any = None) -> Any:
    """Returns a field of the body; `default` if it is None or absent.

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
    """Returns a number in a closed range, None if absent."""
    value = read(body, name, (int, float))
    if value is not None and not low <= value <= high:
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be from {low:g} to {high:g}.")
    return None if value is None else float(value)


def temperature(body: Mapping[str, Any], high: float) -> float | None:
    """Returns the field `temperature`, None if absent. A value near 0 becomes 0, because logits are divided by it."""
    value = number(body, "temperature", 0, high)
    return 0.0 if value is not None and value < MIN_TEMPERATURE else value


def count(body: Mapping[str, Any], name: str, low: int = 1, high: int = MAX_COUNT) -> int | None:
    """Returns a whole number in a closed range, None if absent."""
    value: int | None = read(body, name, int)
    if value is not None and not low <= value <= high:
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be from {low} to {high}.")
    return value


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Returns the texts that end a reply, None if there are none."""
    value = read(body, name, (str, list))
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise bad(f"{name} must be a text, or a list of texts, none of them empty.")
    if len(texts) > MAX_STOPS:
        raise bad(f"{name} has {len(texts)} texts, but it may have {MAX_STOPS} at most.")
    return texts or None


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Returns the text of a message's content: a text, or a list of text parts.

    Raises:
        HttpError: the content has another form.
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
    """Returns the arguments of a call that a client sends back as JSON text of an object. Anything else, and arguments
    that cannot be passed on (nested too deep, half a surrogate pair), become the only argument `arguments`."""
    if isinstance(text, Mapping):
        return text
    try:
        value = json.loads(text)
        check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError, HttpError):
        return {"arguments": text}
    return value if isinstance(value, Mapping) else {"arguments": value}


def tool_of(described: Mapping[str, Any], schema: str) -> Mapping[str, Any]:
    """Returns a tool in OpenAI's form, from an object with name, description and schema of the parameters."""
    function = {
        "name": described["name"],
        "description": read(described, "description", str, ""),
        "parameters": read(described, schema, dict, {}) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Returns (id, name, arguments as JSON text) of each of a message's calls."""
    return [
        (call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
        for call in message.get("tool_calls") or ()
    ]
