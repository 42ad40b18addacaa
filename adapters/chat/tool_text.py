"""The forms of calls in messages, and tools for models whose chat template has none: Hermes' format, written into
ordinary messages.

The wording is that of the templates of Qwen2.5 and Hermes 2 Pro, which a model may know from its training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.ports.chat_codec import ToolSchema

INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def as_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Returns `messages` without tool roles and calls, and with `tools` in the system message.

    Answers to the calls of one turn go into one user message.
    """
    result: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            answer = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            if result and result[-1].get("answers"):
                result[-1] = {**result[-1], "content": _joined(result[-1]["content"], "\n", answer)}
            else:
                result.append({"role": "user", "content": answer, "answers": True})
        elif message.get("tool_calls"):
            calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
            content = message.get("content") or ""
            result.append({"role": message["role"], "content": f"{content}\n{calls}" if content else calls})
        else:
            result.append(message)
    plain = [{key: value for key, value in message.items() if key != "answers"} for message in result]
    return _with_instructions(plain, tools) if tools else list(plain)


def with_mapped_arguments(messages: Sequence[Message]) -> list[Message]:
    """Returns the same messages with the arguments of calls as mappings, also those that are JSON text, as OpenAI's
    clients and many datasets have them: most templates would write such a text as a text in JSON."""
    return _with_arguments(messages, _mapped)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Returns the same messages with the arguments of calls as JSON text."""
    return _with_arguments(messages, lambda arguments: json.dumps(arguments, ensure_ascii=False))


def _mapped(arguments: Any) -> Any:
    """Returns the mapping that a text is the JSON of; anything else unchanged."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments)
            return read if isinstance(read, Mapping) else arguments
    return arguments


def _with_arguments(messages: Sequence[Message], convert: Callable[[Any], Any]) -> list[Message]:
    def converted(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}

    return [
        {**message, "tool_calls": list(map(converted, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def _joined(*contents: Any) -> Any:
    """Returns the contents of messages as one: a text, or parts if one of them has parts."""
    if not any(isinstance(content, list) for content in contents):
        return "".join(map(str, contents))
    parts = (each if isinstance(each, list) else [{"type": "text", "text": str(each)}] for each in contents)
    return [part for content in parts for part in content]


def _call(function: Mapping[str, object]) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def _with_instructions(messages: list[dict[str, object]], tools: Sequence[ToolSchema]) -> list[Message]:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(schemas=schemas)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": _joined(messages[0]["content"], f"\n\n{instructions}")}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
