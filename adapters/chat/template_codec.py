"""`TemplateCodec`: the chat template and the tokenizer that come with a model.

Invariant: the template is applied to text, and that text is tokenised once without adding special tokens (the template
already wrote them); what messages spell out never becomes a special token. Does not own: which messages make a prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.reply_parser import ReplyParser
from rollgrad.adapters.chat.special_text import Guarded, guard
from rollgrad.adapters.chat.streaming import TokenStream
from rollgrad.adapters.chat.tool_text import as_text
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.messages import Message, ParsedReply
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, ToolSchema

SENTINEL = "\uf8ff\uf8fe"
"""Stands for a reply's text while looking for what the template writes after it."""


class TemplateCodec(ChatCodec):
    """Renders, encodes, decodes and parses with `tokenizer`, a transformers tokenizer. A template that knows no tools
    is told of them in Hermes' format, in the system message."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        text = json.dumps(template) if isinstance(template, dict) else template
        self._knows_tools = "tools" in (text or "")
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})
        self._parser = ReplyParser(
            text if self._knows_tools else None, getattr(tokenizer, "response_template", None), self._special
        )

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        guarded = self._guard(messages)
        text = self._apply(guarded.messages, tools, generation_prompt=True)
        return RenderedPrompt(text=guarded.restore(text), token_ids=self._encode(guarded, text))

    def extend(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> tuple[int, ...] | None:
        """See `ChatCodec.extend`: the text that the template writes behind the reply, found by writing the
        conversation with a marked reply both with and without the new messages."""
        guarded = self._guard([*messages[:-1], {**messages[-1], "content": SENTINEL}, *new_messages])
        history = guarded.messages[: len(messages)]
        try:
            before = self._apply(history, tools, generation_prompt=False)
            after = self._apply(guarded.messages, tools, generation_prompt=True)
        except DataError:
            return None
        head, found, end = before.rpartition(SENTINEL)
        new_head, still_found, tail = after.rpartition(SENTINEL)
        if found and still_found:
            # The thinking block of an empty thought comes and goes with the place of the message: it was not sampled.
            kept = head.startswith(new_head) if not messages[-1].get("reasoning_content") else head == new_head
        else:  # the template leaves out the text of a message with calls
            kept, end, tail = True, before, after
        if not kept or not tail.startswith(end):
            return None
        last = self._tokenizer.convert_ids_to_tokens(int(reply_token_ids[-1])) if reply_token_ids else ""
        ended = last in self._special
        following = tail[len(end) :]
        close = max(self._special, key=end.rfind, default="")
        place = end.rfind(close)
        if place >= 0 and not end[place + len(close) :].strip():
            following = ("" if ended else close) + end[place + len(close) :] + following
        elif ended and following.startswith(last):  # the next turn's mark ends this one, and the model sampled it
            following = following[len(last) :]
        return self._encode(guarded, following)

    def parse(self, text: str, prompt: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        """See `ChatCodec.parse`."""
        return self._parser.parse(text, prompt, tools)

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> TokenStream:
        """See `ChatCodec.stream`."""
        return TokenStream(self._tokenizer, self._parser.stream(prompt, tools))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with no template and no special tokens added; those written in it are real."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that starts a sequence, with the special tokens this tokenizer adds by default (BOS)."""
        return tuple(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of token ids, without special tokens unless asked for, spaces untouched."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _guard(self, messages: Sequence[Message]) -> Guarded:
        # Arrow fills the fields that a message lacks with None; templates take presence for a value.
        present = [{k: v for k, v in m.items() if v is not None and k != "visible"} for m in messages]
        return guard(present, self._special)

    def _apply(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} has no chat template, but prompts are to be "
                "rendered with it: set --data.apply-chat-template False (and --data.input-template for a text around "
                "each prompt)."
            )
        from jinja2 import TemplateError

        written = list(messages) if self._knows_tools else as_text(messages, tools)
        schemas = list(tools) if self._knows_tools and tools else None
        error: Exception | None = None
        for candidate in (written, _with_text_arguments(written)):
            try:
                text: str = self._tokenizer.apply_chat_template(
                    candidate, tools=schemas, tokenize=False, add_generation_prompt=generation_prompt
                )
                return text
            except (TemplateError, TypeError) as refused:  # some templates want the arguments of calls as JSON text
                error = error or refused
        raise DataError(
            f"The model's chat template refuses the messages {list(messages)!r}: {error} "
            "(change the messages, or render them yourself with --data.apply-chat-template False)."
        ) from error

    def _encode(self, guarded: Guarded, text: str) -> tuple[int, ...]:
        pieces = guarded.split(text)
        if not any(literal for _, literal in pieces):
            return self.encode(text)
        return tuple(token for piece, literal in pieces for token in self._encode_piece(piece, literal=literal))

    def _encode_piece(self, piece: str, *, literal: bool) -> tuple[int, ...]:
        if not literal:
            return self.encode(piece)
        return tuple(self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same messages with the arguments of calls as JSON text."""

    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
