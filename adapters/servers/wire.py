"""Common parts of the chat wires: a decoded call, and parsing the fields of a body.

A wire (`openai_wire`, `anthropic_wire`) turns a body into a `Call`, and a reply into bodies and events. It does not own
sessions and sockets.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from attrs import frozen

from rollgrad.adapters.servers.guard import HttpError, check_depth
from rollgrad.application.episodes.chat_request import ChatRequest
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.messages import Message, ReplyForm

Value = TypeVar("Value")
MAX_COUNT = 2**31 - 1
"""Largest number of tokens in a request."""

FIELDS = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_k", "return_token_ids"),
        *("chat_template_kwargs", "enable_thinking"),
    }
)
"""Fields of a body that all wires read, or the server for them."""
OPENAI_FIELDS = FIELDS | {"seed", "top_logprobs", "stream_options", "tools", "tool_choice", "parallel_tool_calls"}

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text, special tokens included."""


@frozen(kw_only=True, eq=False)
class Call:
    """A decoded body."""

    request: ChatRequest
    model: str
    stream: bool
    body: Mapping[str, Any]
    """Kept for settings that only the answer depends on."""
    choices: int = 1
    """Replies to each of `prompts`."""
    prompts: Sequence[str | tuple[int, ...] | None] = (None,)
    """Prompts that take the place of the request's, one after the other; None stands for its messages."""


class Wire(Protocol):
    """One chat protocol. All ids of an answer are made from `call_id`. `fields`: those of a body that it reads, or
    refuses."""

    fields: frozenset[str]

    def decode(self, body: Mapping[str, Any]) -> Call:
        """Parses a body.

        Raises:
            HttpError: 400; the message says what is wrong and where.
        """
        ...

    def encode(self, call: Call, replies: Sequence[ChatReply], call_id: str, decode: Decode) -> dict[str, Any]:
        """Returns the answer to a call that does not stream, with `choices` replies to each prompt in turn."""
        ...

    def events(self, call: Call, call_id: str) -> "EventStream":
        """Returns the answer to a call that streams."""
        ...

    def error(self, error: HttpError) -> dict[str, Any]:
        """Returns the body of a refusal."""
        ...


class EventStream(Protocol):
    """Server-sent events of one answer, as text."""

    def start(self, read: int) -> Iterator[str]:
        """Yields the events before the first token. `read`: tokens that the engine has been given, 0 if not known
        yet."""
        ...

    def piece(self, field: str, text: str, choice: int) -> Iterator[str]:
        """Yields the events of a piece of `content` or `reasoning_content` of one of the replies."""
        ...

    def finish(self, replies: Sequence[ChatReply], decode: Decode) -> Iterator[str]:
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
        raise bad("messages is missing: give the conversation so far.", "missing_messages", param="messages")
    return messages


def call_of(
    body: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    messages: Sequence[Message] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    form: ReplyForm | None = None,
    prompts: Sequence[str | tuple[int, ...] | None] = (None,),
    choices: int = 1,
) -> Call:
    """Returns the call of a body with parsed parts. `settings` are fields of `SamplingParams`; None keeps the default.

    Raises:
        HttpError: the model's name or `stream` has another type.
    """
    changes = {name: value for name, value in settings.items() if value is not None}
    return Call(
        request=ChatRequest(messages=messages, tools=tools, changes=changes, form=form, prompt=prompts[0]),
        model=read(body, "model", str, ""),
        stream=read(body, "stream", bool, False),
        body=body,
        choices=choices,
        prompts=prompts,
    )


def form_of(
    tools: Sequence[Mapping[str, Any]],
    *,
    schema: Mapping[str, Any] | bool | None = None,
    required: bool = False,
    name: str | None = None,
    several: bool = True,
) -> ReplyForm | None:
    """Returns the form of a reply, None for any.

    Args:
        tools: tools of the request, in OpenAI's form.
        schema: JSON schema of a text, None for any text.
        required: one of the tools must be called.
        name: tool that must be called.
        several: a reply may have several calls.

    Raises:
        HttpError: the tools lack the one that must be called.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if name is not None and name not in names:
        raise bad(f"tool_choice names {name[:60]!r}, which is none of tools: add it there.", param="tool_choice")
    if required and not names:
        told = "tool_choice requires a call, but there are no tools: add them, or leave tool_choice out."
        raise bad(told, param="tool_choice")
    if name is not None:
        return ReplyForm(calls=(name,))
    if required:
        return ReplyForm(calls=names, several=several)
    return None if schema is None else ReplyForm(schema=schema, calls=names, several=several)


def tools_and_form(
    body: Mapping[str, Any],
    convert: Callable[[Any, int], Mapping[str, Any]],
    schema: Mapping[str, Any] | bool | None,
    *,
    within: str | None = None,
) -> tuple[list[Mapping[str, Any]], ReplyForm | None]:
    """Returns the tools that a body of one of OpenAI's wires offers, and the form of a reply, None for any.

    Args:
        body: body of the request.
        convert: returns a tool in OpenAI's form, from the body's and its place.
        schema: JSON schema of a text, None for any text.
        within: field of `tool_choice` that holds the name of one function; None where the name is beside the type.

    Raises:
        HttpError: the tools or `tool_choice` have another form.
    """
    choice = body.get("tool_choice") or "auto"
    given = [] if choice == "none" else read(body, "tools", list, [])
    tools = each("tools", given, convert)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        with inside("tool_choice"):
            choice, tools = _allowed(choice, tools, within)
    name = None
    if choice not in ("auto", "none", "required"):
        named: Any = choice if isinstance(choice, dict) and choice.get("type") == "function" else {}
        function = named if within is None else named.get(within)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(
                f"tool_choice is {json.dumps(choice)[:60]}, but it must be auto, none, required, one function or "
                "allowed_tools.",
                param="tool_choice",
            )
        name = function["name"]
    several = read(body, "parallel_tool_calls", bool, True)
    return tools, form_of(tools, schema=schema, required=choice == "required", name=name, several=several)


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], within: str | None
) -> tuple[str, list[Mapping[str, Any]]]:
    """Returns the choice among the tools that a `tool_choice` allows, and these tools; the model sees no others.

    Raises:
        HttpError: it has another form, or allows none of `tools`.
    """
    described = choice if within is None else read(choice, "allowed_tools", dict, {})
    named = [tool for tool in read(described, "tools", list, []) if isinstance(tool, dict)]
    names = [(tool if within is None else read(tool, within, dict, {})).get("name") for tool in named]
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    mode = described.get("mode")
    if mode not in ("auto", "required") or not allowed:
        raise bad("tool_choice allows tools, so its mode must be auto or required, and its tools some of tools.")
    return str(mode), allowed


def text_schema(described: Mapping[str, Any], where: str, within: str | None = None) -> Mapping[str, Any] | bool | None:
    """Returns the JSON schema of the text that OpenAI's format `described` asks for, None for any text.

    Args:
        described: the format, in the field `where` of the body.
        where: name of the field, for errors.
        within: field of the format that holds the schema's; None where it is beside the type.

    Raises:
        HttpError: the format is of another type, or lacks its schema.
    """
    kind = described.get("type")
    if kind == "json_schema":
        if within is None:
            return schema_of(described, where)
        with inside(where):
            inner = read(described, within, dict, {})
        return schema_of(inner, f"{where}.{within}")
    if kind not in ("text", "json_object"):
        raise bad(f"{where} is of type {kind!r}, but it must be text, json_object or json_schema.", param=where)
    return {"type": "object"} if kind == "json_object" else None


def schema_of(described: Mapping[str, Any], where: str) -> Mapping[str, Any] | bool:
    """Returns the JSON schema in the field `schema` of a format.

    Raises:
        HttpError: there is none.
    """
    schema = described.get("schema")
    if not isinstance(schema, Mapping | bool):
        told = f"{where}.schema is missing: give the JSON schema that the reply follows."
        raise bad(told, param=f"{where}.schema")
    return schema


def bad(message: str, code: str = "invalid_value", *, param: str | None = None) -> HttpError:
    """Returns a 400."""
    return HttpError(400, message, code=code, param=param)


@contextmanager
def inside(where: str) -> Iterator[None]:
    """Puts `where` before the field that a refusal in the block is about."""
    try:
        yield
    except HttpError as error:
        error.param = where if error.param is None else f"{where}.{error.param}"
        raise


def each(where: str, given: Sequence[Any], convert: Callable[[Any, int], Value]) -> list[Value]:
    """Returns what `convert` makes of each item of the field `where`, and its place.

    Raises:
        HttpError: it refuses an item, which the error names.
    """
    converted = []
    for index, item in enumerate(given):
        with inside(f"{where}[{index}]"):
            converted.append(convert(item, index))
    return converted


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
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be {expected}.", param=name)
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
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be from {low:g} to {high:g}.", param=name)
    return None if value is None else float(value)


def count(body: Mapping[str, Any], name: str, low: int = 1, high: int = MAX_COUNT) -> int | None:
    """Returns a whole number in a closed range, None if absent."""
    value: int | None = read(body, name, int)
    if value is not None and not low <= value <= high:
        raise bad(f"{name} is {json.dumps(value)[:60]}, but it must be from {low} to {high}.", param=name)
    return value


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


def named_event(kind: str, **fields: Any) -> str:
    """Returns a server-sent event with its name, which is also the `type` of its data."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def usage_of(replies: Sequence[ChatReply], choices: int) -> tuple[int, int]:
    """Returns the tokens of the prompts and of all replies, `choices` to each prompt in turn, calls of the server's own
    tools included."""
    prompts = sum(len(reply.prompt_token_ids) for reply in replies[::choices])
    read = prompts + sum(reply.earlier[0] for reply in replies)
    return read, sum(reply.sampled for reply in replies)


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Returns (id, name, arguments as JSON text) of each of a message's calls."""
    return [
        (call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
        for call in message.get("tool_calls") or ()
    ]
