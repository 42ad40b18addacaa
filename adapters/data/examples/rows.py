"""The content of a row of a dataset, whatever its format: conversations, texts and tokens to learn from.

Invariant: a row that cannot be used raises `RowError`, which has the reason that the report counts it under; nothing
of a row is ever guessed or left out silently. Does not own: which columns say what (`formats`), nor tokens
(`preparation`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from rollgrad.adapters.chat.pictures import is_image
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.datasets.columns import has_value, value_at, written_messages
from rollgrad.adapters.data.datasets.prompt_builder import ROLES
from rollgrad.application.foreign import foreign_code, shown
from rollgrad.domain.episodes.messages import Message, call_entry
from rollgrad.domain.errors import DataError


class Rows(Protocol):
    """Rows by index."""

    def __len__(self) -> int:
        """Returns how many there are."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Returns row `index`.

        Raises:
            RowError: it cannot be read.
        """
        ...


def decoded(read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns a row that `read` decodes, whatever a decoder raises on a broken file.

    Raises:
        RowError: it cannot be decoded.
    """
    with foreign_code(lambda words: RowError(Reason.IMAGE, f"The row cannot be decoded: {words}")):
        return read()


def broken(sentence: str) -> RowError:
    """The error of a row whose values are not as they should be."""
    return RowError(Reason.BROKEN, sentence)


def overlong_row(place: str, sentence: str) -> DataError:
    """Returns the error that ends a run at a row that is too long."""
    return DataError(
        f"{place}: {sentence} Raise --data.max_tokens, or let such rows be dropped or cut (--data.overlong drop or "
        "cut)."
    )


@frozen(kw_only=True)
class Conversation:
    """Messages, the `weights` of each in the loss (0: context), the tools that the model is told of, and variables for
    the template. `whole`: everything that the template writes is trained, not only messages with a weight."""

    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    whole: bool = False


@frozen(kw_only=True)
class PlainText:
    """A text without a template: `prompt` is context, unless `whole`, and `completion` is trained."""

    prompt: str
    completion: str
    whole: bool = False


@frozen(kw_only=True)
class Pretokenised:
    """Tokens and weights as a row has them."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    images: tuple[Any, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    """Tokens of each image: the first, and the one after the last."""
    reply: int = 0
    """Place of the first token of the reply."""
    says: str | None = None
    """Text of the tokens from there on, where the row has it."""


@frozen(kw_only=True)
class Pair:
    """Two replies to one prompt, of which the first is better, by `margin` where the row says so. The prompt of texts
    that are `whole` is the tokens that both begin with."""

    chosen: Conversation | PlainText
    rejected: Conversation | PlainText
    margin: float = 0.0


@frozen(kw_only=True)
class Labelled:
    """A reply that is good or bad."""

    reply: Conversation | PlainText
    desirable: bool


@frozen(kw_only=True)
class Steps:
    """A solution whose steps are judged: `ends` are the characters of its text, from its beginning to the end of each
    step that has a label, and `labels` the probabilities that these steps are right."""

    solution: Conversation | PlainText
    ends: tuple[int, ...]
    labels: tuple[float, ...]


Sample = Conversation | PlainText | Pretokenised | Pair | Labelled | Steps

LARGEST, TINIEST = 3e38, 1e-37
"""Numbers between which float32 holds one, as it is learned with."""

SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Roles by the speakers in `from`, as datasets on the hub name them."""


def column_value(row: Mapping[str, Any], key: str) -> Any:
    """A column's value.

    Raises:
        RowError: the row has no such column.
    """
    if not has_value(row, key):
        raise broken(f"The row has no column {key!r}, as other rows have.")
    return value_at(row, key)


def text_of(value: Any, column: str) -> str:
    """A column's text.

    Raises:
        RowError: it is no text.
    """
    if value is None:
        raise RowError(Reason.EMPTY, f"{column} has no value.")
    if not isinstance(value, str):
        raise broken(f"{column} holds {shown(value)}, which is no text.")
    return value


def read_messages(value: Any, column: str, known_role: Callable[[str], bool] | None = None) -> list[Message]:
    """A column's messages: keys without a value left out, arguments of calls as mappings.

    Args:
        value: what the column holds.
        column: its name, for errors.
        known_role: whether the chat template has a role besides the usual ones; None knows no other.

    Raises:
        RowError: it holds no messages, or one of them is not as messages are.
    """
    value = written_messages(value)
    if value is None or (isinstance(value, Sequence) and not isinstance(value, str) and not value):
        raise RowError(Reason.EMPTY, f"{column} has no messages.")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise broken(f"{column} holds {shown(value)}, which is no list of messages.")
    return [_message(item, f"message {place} of {column}", known_role) for place, item in enumerate(value, 1)]


def read_sharegpt(value: Any, column: str) -> list[Message]:
    """A column's messages in ShareGPT's form, `from` and `value`; those with `role` and `content` are taken as well.

    Raises:
        RowError: as `read_messages`; or nobody known speaks.
    """
    value = written_messages(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise broken(f"{column} holds {shown(value)}, which is no list of messages.")
    messages: list[Any] = []
    for place, item in enumerate(value, 1):
        if not isinstance(item, Mapping) or item.get("from") is None:
            messages.append(item)
            continue
        speaker = item["from"]
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise broken(
                f"message {place} of {column} is from {shown(speaker)}: known are {', '.join(SHAREGPT_ROLES)}."
            )
        kept = {key: item[key] for key in ("train", "weight") if item.get(key) is not None}
        if speaker == "function_call":
            messages.append(
                {"role": role, "content": "", "tool_calls": _json(item.get("value"), place, column), **kept}
            )
        else:
            messages.append({"role": role, "content": item.get("value"), **kept})
    return read_messages(messages, column)


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, given as a list or as JSON text; none for an empty list, which templates tell from none.

    Raises:
        RowError: it is neither, or a tool has no name.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError) as error:
            raise broken(f"tools holds text that is no JSON: {error}.") from error
    if value is None:
        return ()
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise broken(f"tools holds {shown(value)}, which is no list of tools.")
    tools = []
    for tool in value:
        found = without_none(tool)
        function = found.get("function", found) if isinstance(found, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise broken(f"tools holds {shown(tool)}, which has no name: a tool is a function with a name.")
        tools.append(found if "function" in found else {"type": "function", "function": dict(found)})
    return tuple(tools)


def read_weight(value: Any, column: str) -> float:
    """A weight in the loss: 0, or a number above it that float32 holds.

    Raises:
        RowError: it is none.
    """
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not (value == 0 or TINIEST <= value <= LARGEST):
        raise broken(f"{column} is {shown(value)}: a weight is 0, or a number from {TINIEST:g} to {LARGEST:g}.")
    return float(value)


def read_number(value: Any, column: str) -> float:
    """A number that float32 holds.

    Raises:
        RowError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise broken(f"{column} is {shown(value)}, which is no number from -{LARGEST:g} to {LARGEST:g}.")
    return float(value)


def read_label(value: Any, column: str) -> bool:
    """Whether a label says good: true or 1, against false or 0, also as the words.

    Raises:
        RowError: it is something else.
    """
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, "true", "1"):  # 1 and 1.0 are equal to True
        return True
    if word in (False, "false", "0"):
        return False
    raise broken(f"{column} is {shown(value)}: a label is true or 1 for a good reply, false or 0 for a bad one.")


def without_none(value: Any) -> Any:
    """`value` without the keys that have none: Arrow gives every mapping the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def _message(item: Any, place: str, known_role: Callable[[str], bool] | None) -> Message:
    if not isinstance(item, Mapping):
        raise broken(f"{place} is {shown(item)}: a message has a role and content.")
    calls = item.get("tool_calls")
    message: dict[str, Any] = without_none({key: part for key, part in item.items() if key != "tool_calls"})
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or (known_role is not None and known_role(role))):
        raise broken(f"{place} has the role {shown(role)}, which is none of {', '.join(ROLES)} nor in the template.")
    if calls:
        message["tool_calls"] = _calls(calls, place)
        message.setdefault("content", "")
    content = message.get("content")
    if content is None:
        raise RowError(Reason.EMPTY, f"{place} has no content.")
    if isinstance(content, list):  # templates that take texts write a list as Python does
        parts = [part if is_image(part) else _part(part, place) for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        message["content"] = (
            "".join(texts)
            if len(texts) == len(parts)
            else [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        )
    elif not isinstance(content, str):
        raise broken(f"{place} has the content {shown(content)}, which is no text.")
    for key in ("reasoning_content", "name", "tool_call_id"):
        if key in message and not isinstance(message[key], str):
            raise broken(f"{place} has the {key} {shown(message[key])}, which is no text.")
    return message


def _part(part: Any, place: str) -> str:
    """The text of a part of a message's content."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise broken(f"{place} has the part {shown(part)} in its content, which is no text: text alone is trained.")
    if {"train", "weight"} & part.keys():
        raise broken(f"{place} has a part of its own train or weight: only whole messages have them.")
    return text


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise broken(f"{place} has the tool_calls {shown(value)}: they are a list of calls.")
    calls = []
    for number, item in enumerate(value):
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise broken(f"{place} has the tool call {shown(item)}: a call has a name and arguments.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise broken(f"{place} calls {function['name']} with arguments that are no JSON: {error}.") from error
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise broken(f"{place} calls {function['name']} with {shown(arguments)}: arguments are an object.")
        given = item.get("id")
        # Mistral's templates demand nine letters and digits.
        calls.append(call_entry(given if isinstance(given, str) else f"call{number:05d}", function["name"], arguments))
    return calls


def _json(value: Any, place: int, column: str) -> Any:
    try:
        return json.loads(text_of(value, f"message {place} of {column}"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, RowError):
            raise
        raise broken(f"message {place} of {column} is a call that is no JSON: {error}.") from error
