"""Parses replies into thinking, text and tool calls, with transformers' response parser.

A checkpoint's own `response_template` is used if it has one; for others marks in the chat template identify the format.
A call that cannot be read does not hide other calls. No part of a reply is ever evaluated.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.call_marks import CallMarks
from rollgrad.adapters.chat.field_stream import FieldStream
from rollgrad.adapters.chat.reply_formats import HERMES, MARKS, reply_fields
from rollgrad.adapters.chat.special_text import SpecialTokens
from rollgrad.domain.episodes.messages import Message, ParsedReply, ReplyForm, ToolCall, assistant_message
from rollgrad.domain.ports.chat_codec import ToolSchema

START = "\x02reply\x03"
"""Placeholder at the beginning of the reply; no reply contains it."""

MAX_DEPTH = 64
"""Deepest nesting of arguments: no tool needs more, and templates walk them recursively."""


class ReplyParser:
    """Parses the replies of a model with this `chat_template`.

    Args:
        chat_template: the model's, None for a model without one.
        response_template: the checkpoint's own, if it has one.
        special_tokens: tokens that are removed from texts.
    """

    def __init__(
        self, chat_template: str | None, response_template: Mapping[str, Any] | None, special_tokens: Sequence[str]
    ) -> None:
        fields = reply_fields(chat_template) or HERMES
        self._template = response_template or {"start_anchor": START, "fields": fields}
        self._own = response_template is None
        self._special = SpecialTokens([*special_tokens, *MARKS])

    def parse(self, text: str, prompt: str, tools: Sequence[ToolSchema], form: ReplyForm | None = None) -> ParsedReply:
        """Implements `ChatCodec.parse`."""
        stream, fields = self._read([text], prompt, tools)
        if stream.failed:  # an unreadable region hides text in the same piece: parse again in single characters
            stream, fields = self._read(text, prompt, tools)
        message = assistant_message(
            fields["content"], reasoning=fields["reasoning_content"], tool_calls=stream.tool_calls
        )
        if form is not None and form.schema is not None and not any(c.name in form.calls for c in stream.tool_calls):
            return ParsedReply(message=self._structured(text, prompt))  # some formats take any object for a call
        error = "The tool call could not be read." if stream.failed else None
        return ParsedReply(message=message, tool_calls=stream.tool_calls, error=error)

    def _structured(self, text: str, prompt: str) -> Message:
        """Returns the message of a reply of which everything after its thinking is text."""
        thought = ""
        if text.startswith("<think>") or _begins_thinking(prompt):
            thought, _, text = text.removeprefix("<think>").partition("</think>")
        return assistant_message(self._special.remove(text).strip(), reasoning=thought.strip())

    def stream(self, prompt: str, tools: Sequence[ToolSchema]) -> FieldStream:
        """Returns a parser for a reply that comes in pieces."""
        from transformers.utils.chat_parsing import ResponseParser

        known = [tool["function"]["name"] for tool in tools]

        def read_calls(found: Sequence[Any], text: str) -> tuple[ToolCall, ...]:
            functions = [function for value in found for function in _functions(self._cleaned(value))]
            reply = hashlib.sha256((prompt + text).encode(errors="replace")).hexdigest()
            return tuple(_call(function, _call_id(reply, index), known) for index, function in enumerate(functions))

        parser = ResponseParser(self._template, prefix=self._prefix(prompt), tools=list(tools) or None)
        marks = CallMarks(thinks=_begins_thinking(prompt)) if self._template.get("fields") is HERMES else None
        return FieldStream(parser, self._special, read_calls, marks)

    def _read(
        self, pieces: Iterable[str], prompt: str, tools: Sequence[ToolSchema]
    ) -> tuple[FieldStream, dict[str, str]]:
        stream = self.stream(prompt, tools)
        told = [piece for text in pieces for piece in stream.feed(text)]
        fields = {"content": "", "reasoning_content": ""}
        for name, piece in (*told, *stream.finish()):
            fields[name] += piece
        return stream, fields

    def _prefix(self, prompt: str) -> str:
        if not self._own:
            return prompt
        return START + ("<think>\n" if _begins_thinking(prompt) else "")

    def _cleaned(self, value: Any) -> Any:
        """Returns a call without special tokens, because a reply may end with one in the middle of a call."""
        if isinstance(value, str):
            return self._special.remove(value)
        if isinstance(value, dict):
            return {key: self._cleaned(item) for key, item in value.items()}
        return value


def _begins_thinking(prompt: str) -> bool:
    """Returns whether a reply to the prompt begins within a thought."""
    return prompt.rstrip().endswith("<think>")


def _call_id(reply: str, index: int) -> str:
    """Returns nine letters and digits, as Mistral's templates require, which differ for each call of a reply."""
    return hashlib.sha256(f"{index} {reply}".encode()).hexdigest()[:9]


def _functions(value: Any) -> Iterator[Any]:
    """Yields the functions called in one region: mappings with name and arguments, or text that could not be read."""
    if isinstance(value, Mapping):
        yield value.get("function", value)
        return
    text = str(value).strip()
    named = re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\](.*)", text, flags=re.DOTALL)
    if named:
        yield {"name": named[1], "arguments": named[2]}
        return
    decoder, place = json.JSONDecoder(strict=False), 0
    while True:
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield text[place:]
            return
        yield from found if isinstance(found, list) else [found]
        if isinstance(found, dict) and "name" not in found:
            return  # not a call; neither is the text after it
        while place < len(text) and text[place] in " \n;":
            place += 1
        if text[place : place + 1] not in ("[", "{"):
            return  # text that the model wrote after its calls


def _call(function: Any, call_id: str, known: Sequence[str]) -> ToolCall:
    """Returns a call with its arguments, or with the error that kept them from being read."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        wrong = "A tool call is one JSON object with the name of a function and its arguments."
        return ToolCall(id=call_id, name="", arguments=None, error=wrong)
    name = function["name"].strip()
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except ValueError as error:
            return ToolCall(id=call_id, name=name, arguments=None, error=f"The arguments are not valid JSON: {error}.")
        except RecursionError:
            return ToolCall(id=call_id, name=name, arguments=None, error=TOO_DEEP)
    if not isinstance(arguments, Mapping):
        return ToolCall(id=call_id, name=name, arguments=None, error="The arguments are not a JSON object.")
    if _nested_deeper(arguments, MAX_DEPTH):
        return ToolCall(id=call_id, name=name, arguments=None, error=TOO_DEEP)
    if known and name not in known:
        unknown = f"There is no function {name!r}; the functions are {', '.join(known)}."
        return ToolCall(id=call_id, name=name, arguments=dict(arguments), error=unknown)
    return ToolCall(id=call_id, name=name, arguments=dict(arguments))


TOO_DEEP = f"The arguments are nested more than {MAX_DEPTH} levels deep."


def _nested_deeper(value: Any, levels: int) -> bool:
    """Returns whether lists and objects in `value` are nested more than `levels` deep."""
    layer = [value]
    for _ in range(levels):
        inner = [item.values() if isinstance(item, Mapping) else item for item in layer]
        layer = [item for items in inner for item in items if isinstance(item, Mapping | list)]
        if not layer:
            return False
    return True
