"""`TemplateCodec`: a model's chat template and tokenizer.

Invariant: the template is applied to text, and that text is tokenised once without adding special tokens, which the
template has written already; text of messages never becomes a special token. Does not own: the choice of messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from attrs import frozen

from rollgrad.adapters.chat.reply_parser import ReplyParser
from rollgrad.adapters.chat.special_text import Guarded, guard, unused_character
from rollgrad.adapters.chat.streaming import TokenStream
from rollgrad.adapters.chat.tool_text import as_text
from rollgrad.domain.episodes.messages import Message, ParsedReply
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, ToolSchema

Rendered = TypeVar("Rendered")


@frozen
class WrittenPrompt:
    """A conversation written by the template, not yet tokenised. `marked` is its text, with the placeholders of
    `guarded`."""

    text: str
    guarded: Guarded
    marked: str


class TemplateCodec(ChatCodec):
    """Renders, encodes, decodes and parses with `tokenizer`, a transformers tokenizer. If the template has no
    place for tools, they are described in the system message, in Hermes' format. `template_kwargs`: variables for the
    template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        template = tokenizer.chat_template
        text = json.dumps(template) if isinstance(template, dict) else template
        self._knows_tools = "tools" in (text or "")
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})
        # <tool_response> and <think> often are not special tokens, but mean as much to the model.
        self._written = sorted({token.content for token in added if token.content in (text or "")} - {*self._special})
        self._template = text or ""
        self._parser = ReplyParser(
            text if self._knows_tools else None, getattr(tokenizer, "response_template", None), self._special
        )

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        written = self.write(messages, tools)
        return RenderedPrompt(text=written.text, token_ids=self.tokens(written))

    def write(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> WrittenPrompt:
        """`render` without the tokens; raises as it does."""
        guarded = self.guarded(messages, tools)
        marked = self._apply(guarded.messages, guarded.tools, generation_prompt=True)
        return WrittenPrompt(text=_well_formed(guarded.restore(marked)), guarded=guarded, marked=marked)

    def tokens(self, written: WrittenPrompt) -> tuple[int, ...]:
        """Returns the token ids of a prompt."""
        return self._encode(written.guarded, written.marked)

    def mentions(self, role: str) -> bool:
        """Returns whether the template names a role; some have roles beside the usual ones."""
        return any(f"{mark}{role}{mark}" in self._template.replace("\\", "") for mark in "'\"")

    def lengths(self, prompts: Sequence[WrittenPrompt]) -> list[int]:
        """Returns the number of tokens of each prompt. All are tokenised in one call, which uses all cores."""
        whole = iter(self._count([p.text for p in prompts if p.guarded.mark is None], add_special_tokens=False))
        return [next(whole) if p.guarded.mark is None else len(self.tokens(p)) for p in prompts]

    def text_lengths(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens that `encode_prompt` makes of each text, in one call of the tokenizer."""
        return self._count(texts, add_special_tokens=True)

    def _count(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        if not texts:
            return []
        written = [_well_formed(text) for text in texts]
        # Not verbose: the tokenizer would warn of long texts, which the caller counts on purpose.
        batch = self._tokenizer(written, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [len(token_ids) for token_ids in batch]

    def extend(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> tuple[int, ...] | None:
        """Implements `ChatCodec.extend`. The text after the reply is found by applying the template to the conversation
        with a marked reply twice, with and without the new messages, and comparing."""
        reply = messages[-1]
        mark = unused_character([messages, new_messages])
        marked = self.guarded([*messages[:-1], {**reply, "content": mark}, *new_messages], tools)
        behind = self._text_after(marked, len(messages), mark, thought=bool(reply.get("reasoning_content")))
        if behind is None and reply.get("tool_calls"):  # some templates write the text behind the results of the calls
            marked = self.guarded([*messages, *new_messages], tools)
            behind = self._text_after(marked, len(messages), None, thought=True)
        if behind is None:
            return None
        end, following = behind
        last = self._tokenizer.convert_ids_to_tokens(int(reply_token_ids[-1])) if reply_token_ids else ""
        if last not in self._special:  # truncated: the model has not ended its turn
            return self._encode(marked, end + following)
        close = last if last in end else max(self._special, key=end.rfind)
        place = end.rfind(close)
        lacking = end[place + len(close) :] if place >= 0 else end
        # In some templates the next turn's mark also ends this turn; the model has then sampled it already.
        return self._encode(marked, lacking + (following if last in end else following.removeprefix(last)))

    def _text_after(self, guarded: Guarded, known: int, mark: str | None, *, thought: bool) -> tuple[str, str] | None:
        """Returns the text that ends the last of the first `known` messages, and the text that follows it.

        `mark` is the text of that message, None if it has none. Returns None if the template changes earlier text.
        """
        try:
            before = self._apply(guarded.messages[:known], guarded.tools, generation_prompt=False)
            after = self._apply(guarded.messages, guarded.tools, generation_prompt=True)
        except DataError:
            return None
        marked = mark is not None and mark in before and mark in after
        if mark and marked:
            head, _, end = before.rpartition(mark)
            new_head, _, tail = after.rpartition(mark)
            # A template may write an empty thinking block only into the last message: nothing sampled changes with it.
            kept = head == new_head if thought else head.startswith(new_head)
        else:  # the template omits the text of a message with calls
            kept, end, tail = True, before, after
        if kept and not tail.startswith(end):  # some templates write this token at the end of the conversation alone
            end = end.removesuffix(self._tokenizer.eos_token or "")
            kept = any(token in end for token in self._special)
        if not kept or not tail.startswith(end):
            return None
        following = tail[len(end) :]
        if end is before or guarded.messages[known - 1].get(
            "tool_calls"
        ):  # the calls were sampled, the token after them was not
            place = max(map(end.rfind, self._special), default=-1)
            end = end[place:] if place >= 0 else ""
        return end, following

    @cached_property
    def end_of_turn(self) -> str:
        """Implements `ChatCodec.end_of_turn`; without a chat template it is the tokenizer's end-of-sequence token."""
        closing = self._tokenizer.eos_token or ""
        if not self._tokenizer.chat_template:
            return closing
        mark = unused_character([])
        conversation: list[Message] = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        try:
            text = self._apply(conversation, [], generation_prompt=False)
        except DataError:  # the template requires other roles
            return closing
        behind = text.rpartition(mark)[2]
        written = [token for token in self._special if token and token in behind]
        # The first one ends the turn; a second one (Phi-3's eos) ends the conversation.
        return min(written, key=lambda token: (behind.find(token), -len(token)), default=closing)

    def parse(self, text: str, prompt: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        """Implements `ChatCodec.parse`."""
        return self._parser.parse(text, prompt, tools)

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> TokenStream:
        """Implements `ChatCodec.stream`."""
        return TokenStream(self._tokenizer, self._parser.stream(prompt, tools))

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of plain text, with no template and no special tokens added; those written in it are
        real."""
        return tuple(self._tokenizer(_well_formed(text), add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text that starts a sequence, with the special tokens this tokenizer adds by
        default (BOS)."""
        return tuple(self._tokenizer(_well_formed(text))["input_ids"])

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of token ids, without special tokens unless asked for, spaces untouched."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def guarded(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Guarded:
        """Returns the messages and tools with placeholders for the control tokens that they spell out."""
        # Arrow fills the fields that a message lacks with None; templates take presence for a value.
        present = [{k: v for k, v in m.items() if v is not None and k != "visible"} for m in messages]
        return guard(present, tools, self._special, self._written)

    def _apply(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} has no chat template, but prompts are to be "
                "rendered with it: set --data.chat_template, or --data.apply_chat_template False (and "
                "--data.input_template for a text around each prompt)."
            )

        def render(candidate: list[Message], schemas: list[ToolSchema] | None) -> str:
            text: str = self._tokenizer.apply_chat_template(
                candidate,
                tools=schemas,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._template_kwargs,
            )
            return text

        return self._accepted(messages, tools, render)

    def _accepted(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        render: Callable[[list[Message], list[ToolSchema] | None], Rendered],
    ) -> Rendered:
        """Calls `render` with the messages in the form that the template accepts; returns its result."""
        from jinja2 import TemplateError

        written = list(messages) if self._knows_tools else as_text(messages, tools)
        schemas = list(tools) if self._knows_tools and tools else None
        error: Exception | None = None
        for candidate in (written, _with_text_arguments(written)):
            try:
                return render(candidate, schemas)
            except (TemplateError, TypeError) as refused:  # some templates want the arguments of calls as JSON text
                error = error or refused
        raise DataError(
            f"The model's chat template refuses the messages: {error} (change them, or render them yourself with "
            f"--data.apply_chat_template False). They are: {list(messages)!r}."
        ) from error

    def generation_spans(self, guarded: Guarded, count: int) -> list[tuple[int, int]]:
        """Returns the characters between the `{% generation %}` marks of a template, in what `apply` writes without a
        generation prompt."""
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(candidate: list[Message], schemas: list[ToolSchema] | None) -> list[tuple[int, int]]:
            _, spans = render_jinja_template(
                conversations=[candidate],
                tools=schemas,
                chat_template=self._tokenizer.get_chat_template(tools=schemas),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._template_kwargs},
            )
            return [(start, stop) for start, stop in spans[0]]

        return self._accepted(guarded.messages[:count], guarded.tools, render)

    def apply(self, guarded: Guarded, count: int, *, generation_prompt: bool) -> str:
        """Returns what the template writes of the first `count` guarded messages, placeholders included.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        return self._apply(guarded.messages[:count], guarded.tools, generation_prompt=generation_prompt)

    def with_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> "TemplateCodec":
        """Returns a codec of the same tokenizer whose template is given these variables besides its own."""
        return TemplateCodec(self._tokenizer, {**self._template_kwargs, **template_kwargs})

    def locate(self, guarded: Guarded, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of `text`, which the template wrote of `guarded`, and the characters of each from the
        first to the one behind the last. The ids are those of `render`; all tokens of a placeholder have the whole of
        it.

        Raises:
            ConfigurationError: the tokenizer is written in Python, and cannot say where its tokens lie.
        """
        token_ids: list[int] = []
        borders: list[tuple[int, int]] = []
        place = 0
        for piece, literal, length in guarded.pieces(text):
            if literal:
                found = self._encode_piece(piece, literal=True)
                token_ids += found
                borders += [(place, place + length)] * len(found)
            else:
                encoded = self._with_offsets(piece, add_special_tokens=False)
                token_ids += encoded["input_ids"]
                borders += _tiled(encoded["offset_mapping"], place)
            place += length
        return token_ids, borders

    def encode_ended(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a whole text, and their characters as `locate` does: it begins as the tokenizer begins
        one, once, and ends with the end-of-sequence token, once.

        Raises:
            ConfigurationError: as `locate`.
        """
        encoded = self._with_offsets(text, add_special_tokens=True)
        token_ids, borders = list(encoded["input_ids"]), _tiled(encoded["offset_mapping"], 0)
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:  # the text spells it out
            token_ids, borders = token_ids[1:], borders[1:]
        if eos is not None and token_ids[-1:] != [eos]:
            token_ids, borders = [*token_ids, eos], [*borders, (len(text), len(text))]
        elif eos is not None:
            borders[-1] = (len(text), len(text))
        return token_ids, borders

    def _with_offsets(self, text: str, *, add_special_tokens: bool) -> Any:
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ConfigurationError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} does not say where its tokens lie in a text, so "
                "that replies cannot be told from prompts: use a fast tokenizer (one with a tokenizer.json)."
            )
        return self._tokenizer(
            _well_formed(text), add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables that the template is given."""
        return self._template_kwargs

    @property
    def special_tokens(self) -> Sequence[str]:
        """Texts of the control tokens."""
        return self._special

    @property
    def template(self) -> str | None:
        """The chat template; None without one."""
        return self._template or None

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a sequence; empty without one."""
        return self._tokenizer.eos_token or ""

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence, if there is one."""
        return self._tokenizer.bos_token_id  # type: ignore[no-any-return]

    def _encode(self, guarded: Guarded, text: str) -> tuple[int, ...]:
        pieces = guarded.split(text)
        if not any(literal for _, literal in pieces):
            return self.encode(text)
        return tuple(token for piece, literal in pieces for token in self._encode_piece(piece, literal=literal))

    def _encode_piece(self, piece: str, *, literal: bool) -> tuple[int, ...]:
        if not literal:
            return self.encode(piece)
        if self._literal is None:
            return tuple(self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return tuple(self._literal.encode(piece, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Any:
        """A copy of the tokenizer that finds no added tokens in a text; None for a tokenizer written in Python.

        The setting `split_special_tokens` would not do: it is shared by all threads, and keeps added tokens that are
        not special.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        written = json.loads(backend.to_str())
        for token in written["added_tokens"]:
            token["special"] = True
        literal = Tokenizer.from_str(json.dumps(written))
        literal.no_truncation()
        literal.no_padding()
        literal.encode_special_tokens = True
        return literal


def _tiled(offsets: Sequence[tuple[int, int]], place: int) -> list[tuple[int, int]]:
    """Offsets from `place` on that leave no character between two tokens: byte-level tokenizers do not count the spaces
    with which a token begins."""
    borders: list[tuple[int, int]] = []
    behind = 0
    for start, stop in offsets:
        borders.append((place + min(start, behind), place + stop))
        behind = stop
    return borders


def _well_formed(text: str) -> str:
    """Returns `text` without halves of surrogate pairs, which JSON can write and no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Returns the same messages with the arguments of calls as JSON text."""

    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
