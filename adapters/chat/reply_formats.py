"""Formats of replies of model families, for transformers' response parser.

Every pattern looks a bounded distance ahead: an unbounded one would take quadratic time on a long reply.
"""

from collections.abc import Mapping, Sequence
from typing import Any

THINKING = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
VERBATIM = {"name": "text", "args": {"strip": False}}
"""Parser of an argument whose white space is kept, because it may be the indentation of code."""
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
        "open_pattern": r"<tool_call>\s{0,16}<function=(?P<name>[^\n>]{1,128}+)>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]{1,128}+)>\n?(?P<value>.*?)"
            r"(?:\n?</parameter>|\n?</function>\s*\Z|\Z)",
            "value_parser": VERBATIM,
        },
        "transform": CALL,
    },
    "content": TEXT,
}
GLM = {
    "reasoning_content": THINKING,
    "tool_calls": {
        "open_pattern": r"<tool_call>(?P<name>[^\s<]{1,128}+)\n?",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>[^<]{1,128}+)</arg_key>\s{0,16}"
            r"<arg_value>(?P<value>.*?)(?:</arg_value>|\Z)",
            "value_parser": VERBATIM,
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
        "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]{1,128}+)\n```json\n"
        r"|(?!function<)(?P<name>[^\n<]{1,128}+)<｜tool▁sep｜>)",
        "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>\s*",
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
        "open_pattern": r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[^\s<]{1,128}+)"
        r"(?:<\|channel\|>commentary)?(?:\s{1,16}(?:<\|constrain\|>)?json)?<\|message\|>",
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
"""Marks in chat templates, and the format of replies of such models; the first mark found decides."""

MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
"""Marks around all calls, which carry no information; like special tokens they are removed from texts."""


def reply_fields(chat_template: str | None) -> Mapping[str, Any] | None:
    """Returns the format of replies that a chat template shows, None if it shows none."""
    return next((fields for mark, fields in FORMATS if mark in (chat_template or "")), None)
