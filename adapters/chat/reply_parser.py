"""Takes replies apart: thinking, text and tool calls, with transformers' response parser.

A checkpoint that ships a `response_template` is parsed by it; for the others the format is told by the marks in their
chat template. A call that cannot be read never hides the ones that can. Nothing of a reply is ever evaluated.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollgrad.domain.messages import ParsedReply, ToolCall, assistant_message
from rollgrad.domain.ports.chat_codec import ToolSchema

START = "\x02reply\x03"
"""Stands where the reply begins; no reply contains it."""

THINKING = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
TEXT = {"content": "text", "repeats": True, "join": ""}
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

HERMES = {
    "reasoning_content": THINKING,
    "tool_calls": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "text"},
    "content": TEXT,
}
QWEN_XML = {
    "reasoning_content": THINKING,
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            "value_parser": {"name": "text"},
        },
        "transform": CALL,
    },
    "content": TEXT,
}
GLM = {
    "reasoning_content": THINKING,
    "tool_calls": {
        "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\n?",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>",
            "value_parser": {"name": "text"},
        },
        "transform": CALL,
    },
    "content": TEXT,
}
LLAMA = {
    "tool_calls": {"open_pattern": r"\A(?:<\|python_tag\|>)?(?=\{)", "content": "text", "repeats": True},
    "content": TEXT,
}
MISTRAL = {
    "tool_calls": {
        "open": "[TOOL_CALLS]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
        "content": "text",
        "repeats": True,
    },
    "content": TEXT,
}
DEEPSEEK = {
    "reasoning_content": THINKING,
    "tool_calls": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)"
        r"(?:\n```json\n|<｜tool▁sep｜>)",
        "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        "repeats": True,
        "content": "text",
        "transform": CALL,
    },
    "content": TEXT,
}
HARMONY = {
    "reasoning_content": {
        "open": "<|channel|>analysis<|message|>",
        "close_pattern": r"<\|end\|>\s*(?:<\|start\|>assistant)?",
        "content": "text",
    },
    "tool_calls": {
        "open_pattern": r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[^\s<]+)(?:<\|channel\|>commentary)?"
        r"(?:\s+(?:<\|constrain\|>)?json)?<\|message\|>",
        "close_pattern": r"<\|call\|>\s*",
        "repeats": True,
        "content": "text",
        "transform": CALL,
    },
    "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>|<\|end\|>", **TEXT},
}

FORMATS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("<function=", QWEN_XML),
    ("<arg_key>", GLM),
    ("<tool_call>", HERMES),
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters": ', LLAMA),
)
"""A mark in the chat template, and how replies of such models look; the first that is found."""


class FieldStream:
    """Takes a reply apart piece by piece. Texts lose their outer white space; calls come with the end, since only whole
    ones can be read.

    Args:
        parser: transformers' parser.
        special: matches the special tokens, which are left out of texts.
    """

    def __init__(self, parser: Any, special: "re.Pattern[str] | None") -> None:
        self._parser = parser
        self._special = special
        self._held: dict[str, str] = {}
        self.failed = False
        self.calls: Sequence[Any] = ()

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Pieces of `content` and `reasoning_content` that `text` completes."""
        return self._guarded(lambda: self._parser.feed(text))

    def finish(self) -> list[tuple[str, str]]:
        """The pieces still held back; afterwards `calls` has what was found of calls, and `failed` says whether
        something could not be read."""

        def finalize() -> Sequence[Any]:
            message, events = self._parser.finalize()
            self.calls = message.get("tool_calls") or ()
            return list(events)

        return self._guarded(finalize)

    def _guarded(self, advance: Callable[[], Sequence[Any]]) -> list[tuple[str, str]]:
        if self.failed:
            return []
        try:
            events = advance()
        except ValueError:
            self.failed = True
            return []
        pieces = []
        for event in events:
            name = {"thinking": "reasoning_content"}.get(event["field"], event["field"])
            if event["type"] == "region_chunk" and name in ("content", "reasoning_content"):
                pieces.append((name, self._clean(name, event["text"])))
        return [(name, piece) for name, piece in pieces if piece]

    def _clean(self, name: str, text: str) -> str:
        """Holds white space back until something follows it, and drops it in front."""
        whole = self._held.get(name, "") + (self._special.sub("", text) if self._special else text)
        started = name in self._held
        body = whole.rstrip()
        if body or started:
            self._held[name] = whole[len(body) :]
        return body if started else body.lstrip()


class ReplyParser:
    """Parses the replies of a model with this `chat_template`.

    Args:
        chat_template: the model's, None for a model without one.
        response_template: the checkpoint's own, if it ships one.
        special_tokens: taken out of the texts.
    """

    def __init__(
        self, chat_template: str | None, response_template: Mapping[str, Any] | None, special_tokens: Sequence[str]
    ) -> None:
        fields = next((fields for mark, fields in FORMATS if mark in (chat_template or "")), HERMES)
        self._template = response_template or {"start_anchor": START, "fields": fields}
        self._own = response_template is None
        tokens = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def parse(self, text: str, prompt: str, tools: Sequence[ToolSchema]) -> ParsedReply:
        """See `ChatCodec.parse`."""
        stream = self.stream(prompt, tools)
        fields = {"content": "", "reasoning_content": ""}
        for name, piece in (*stream.feed(text), *stream.finish()):
            fields[name] += piece
        if stream.failed:
            message = assistant_message(self._clean(text))
            return ParsedReply(message=message, error="The tool call could not be read.")
        known = [tool["function"]["name"] for tool in tools]
        raw = [call for value in stream.calls for call in _functions(self._stripped(value))]
        digest = hashlib.sha256((prompt + text).encode(errors="replace")).hexdigest()[:8]
        calls = tuple(_call(function, f"{digest}{index % 10}", known) for index, function in enumerate(raw))
        content = fields["content"]
        if calls and not content and all(call.arguments is None for call in calls):
            content = self._clean(text)  # all that the model said
        message = assistant_message(content, reasoning=fields["reasoning_content"], tool_calls=calls)
        return ParsedReply(message=message, tool_calls=calls)

    def stream(self, prompt: str, tools: Sequence[ToolSchema]) -> FieldStream:
        """Parses a reply that comes in pieces."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(self._template, prefix=self._prefix(prompt), tools=list(tools) or None)
        return FieldStream(parser, self._special)

    def _prefix(self, prompt: str) -> str:
        if not self._own:
            return prompt
        return START + ("<think>\n" if prompt.rstrip().endswith("<think>") else "")

    def _stripped(self, value: Any) -> Any:
        return self._clean(value) if isinstance(value, str) else value

    def _clean(self, text: str) -> str:
        return (self._special.sub("", text) if self._special else text).strip()


def _functions(value: Any) -> Iterator[Any]:
    """The functions called in one region: mappings with name and arguments, or text that could not be read."""
    if isinstance(value, Mapping):
        yield value.get("function", value)
        return
    text = str(value).strip()
    named = re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\](.*)", text, flags=re.DOTALL)
    if named:
        yield {"name": named[1], "arguments": named[2]}
        return
    decoder = json.JSONDecoder()
    while text:
        try:
            found, end = decoder.raw_decode(text)
        except ValueError:
            yield text
            return
        yield from found if isinstance(found, list) else [found]
        text = text[end:].lstrip(" \n;")
        if text and text[0] not in "[{":
            return  # what the model wrote after its calls


def _call(function: Any, call_id: str, known: Sequence[str]) -> ToolCall:
    """A call with its arguments read, or with what is wrong with it."""
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
    if not isinstance(arguments, Mapping):
        return ToolCall(id=call_id, name=name, arguments=None, error="The arguments are not a JSON object.")
    if known and name not in known:
        unknown = f"There is no function {name!r}; the functions are {', '.join(known)}."
        return ToolCall(id=call_id, name=name, arguments=dict(arguments), error=unknown)
    return ToolCall(id=call_id, name=name, arguments=dict(arguments))
