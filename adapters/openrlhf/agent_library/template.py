"""Templates, which write conversations and tool answers for the model, and parse its calls.

They do not own tokens, nor the effect of calls.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.reply_parser import ReplyParser
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.tool_text import as_text
from rollgrad.adapters.openrlhf.agent_library.types import ToolCall
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import ConfigurationError

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""ChatML's marks, which texts inside a turn may not contain."""
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


class Template(ABC):
    """A prompt style. `turn_separator` is the text between a reply, whose end the model samples, and the next turn."""

    turn_separator = ""

    @abstractmethod
    def render_system(self, text: str, tools_manifest: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the opening turn, with the tools."""

    @abstractmethod
    def render_turn(self, role: str, text: str, *, add_generation_prompt: bool = False) -> str:
        """Returns one turn."""

    @abstractmethod
    def render_generation_prompt(self, role: str = "assistant") -> str:
        """Returns the text directly before a reply."""

    @abstractmethod
    def render_tool_response(self, text: str) -> str:
        """Returns a tool's answer, for the text of a turn."""

    @abstractmethod
    def render_messages(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools_manifest: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns a whole conversation in the OpenAI shape."""

    @abstractmethod
    def extract_tool_calls_from_text(self, text: str) -> tuple[bool, list[ToolCall | None] | None]:
        """Returns whether a part of the text could not be read, and the calls as in `AgentStepResult.actions`."""


class Qwen3Template(Template):
    """ChatML with calls in Hermes' format. With a `tokenizer` whole conversations are written by its own template."""

    turn_separator = "\n"

    def __init__(self, tokenizer: Any = None) -> None:
        self._codec = None if tokenizer is None else TemplateCodec(tokenizer)
        self._parser = ReplyParser(None, None, SPECIAL_TOKENS)

    def render_system(self, text: str, tools_manifest: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the system turn."""
        (message,) = as_text([{"role": "system", "content": text}], list(tools_manifest or ()))
        return self.render_turn("system", message["content"])

    def render_turn(self, role: str, text: str, *, add_generation_prompt: bool = False) -> str:
        """Returns one turn; marks of ChatML in `text` lose their bars, so that no text ends its turn."""
        harmless = _SPECIAL.sub(lambda mark: mark.group().replace("|", ""), text)
        following = self.render_generation_prompt() if add_generation_prompt else ""
        return f"<|im_start|>{role}\n{harmless}<|im_end|>\n{following}"

    def render_generation_prompt(self, role: str = "assistant") -> str:
        """Returns the reply's opening."""
        return f"<|im_start|>{role}\n"

    def render_tool_response(self, text: str) -> str:
        """Returns a tool's answer, which stands in a user turn."""
        return f"<tool_response>\n{text}\n</tool_response>"

    def render_messages(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools_manifest: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns a whole conversation; calls of earlier turns and their answers stay in it."""
        tools = list(tools_manifest or ())
        core = [_with_mappings(message) for message in messages]
        if self._codec is not None and add_generation_prompt:
            return self._codec.render(core, tools).text
        turns = [self.render_turn(one["role"], str(one.get("content") or "")) for one in as_text(core, tools)]
        return "".join(turns) + (self.render_generation_prompt() if add_generation_prompt else "")

    def extract_tool_calls_from_text(self, text: str) -> tuple[bool, list[ToolCall | None] | None]:
        """Returns the calls, numbered `call_0` and on."""
        reply = self._parser.parse(text, "", ()) if self._codec is None else self._codec.parse(text, "")
        calls = [
            None if call.arguments is None else ToolCall(f"call_{index}", call.name, dict(call.arguments))
            for index, call in enumerate(reply.tool_calls)
        ]
        if reply.error is not None and not calls:
            calls = [None]
        return None in calls, calls or None


def make_template(name: str | None = None, tokenizer: Any = None) -> Template:
    """Returns the template called `name`: `qwen3`, also without a name.

    Args:
        name: name of the template.
        tokenizer: a transformers tokenizer whose chat template writes conversations; None writes plain ChatML.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in (None, "", "qwen3"):
        raise ConfigurationError(
            f"There is no template {name!r}: use 'qwen3' (with tokenizer= for another model's), or make your own class."
        )
    return Qwen3Template(tokenizer)


def make_chat_protocol(name: str | None = None, tokenizer: Any = None) -> Template:
    """Returns what newer versions of OpenRLHF-Agent call a chat protocol, a template: `qwen3_instruct`, also without a
    name, or `qwen3_thinking`; arguments and errors as of `make_template`."""
    return make_template("qwen3" if name in ("qwen3_instruct", "qwen3_thinking") else name, tokenizer)


def _with_mappings(message: Mapping[str, Any]) -> Message:
    """Returns the message with the arguments of its calls as a mapping; OpenAI clients write them as JSON text."""
    if not message.get("tool_calls"):
        return message

    def read(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return {**message, "tool_calls": [read(call) for call in message["tool_calls"]]}
