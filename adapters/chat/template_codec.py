"""`TemplateCodec`: a model's chat template and tokenizer.

Invariant: the template is applied to text, and that text is tokenised once without adding special tokens, which the
template has written already; text of messages never becomes a special token. Does not own: the choice of messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from attrs import frozen

from rollgrad.adapters.chat.content_parts import in_parts, reads_parts_alone
from rollgrad.adapters.chat.image_files import image_bytes
from rollgrad.adapters.chat.image_text import ImageText, with_images
from rollgrad.adapters.chat.pictures import ImageRenderer, bare, has_images, image_count, without_images
from rollgrad.adapters.chat.reply_formats import HERMES, reply_fields
from rollgrad.adapters.chat.reply_grammar import ReplyGrammar
from rollgrad.adapters.chat.reply_parser import ReplyParser
from rollgrad.adapters.chat.special_text import Guarded, guard, unused_character
from rollgrad.adapters.chat.streaming import TokenStream
from rollgrad.adapters.chat.text_encoder import TextEncoder, well_formed
from rollgrad.adapters.chat.tool_text import as_text, with_mapped_arguments, with_text_arguments
from rollgrad.application.foreign import error_text
from rollgrad.domain.episodes.messages import Message, ParsedReply, ReplyForm
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, ToolSchema

Rendered = TypeVar("Rendered")


@frozen
class WrittenPrompt:
    """A conversation written by the template, not yet tokenised. `marked` is its text, with the placeholders of
    `guarded`; `images` are the files of its images, which stand in the place of the renderer's marks."""

    text: str
    guarded: Guarded
    marked: str
    images: tuple[bytes, ...] = ()


class TemplateCodec(TextEncoder, ChatCodec):
    """Renders, encodes, decodes and parses with `tokenizer`, a transformers tokenizer. If the template has no
    place for tools, they are described in the system message, in Hermes' format. `template_kwargs`: variables for the
    template. `images` renders images in messages; without it they are refused.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, images: ImageRenderer | None = None
    ) -> None:
        super().__init__(tokenizer)
        self._images = images
        self._template_kwargs = dict(template_kwargs or {})
        template = tokenizer.chat_template
        text = json.dumps(template) if isinstance(template, dict) else template
        self._knows_tools = "tools" in (text or "")
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        marks = () if images is None else (images.mark,)
        self._special = sorted(
            {*tokenizer.all_special_tokens, *(token.content for token in added if token.special), *marks}
        )
        # <tool_response> and <think> often are not special tokens, but mean as much to the model.
        self._written = sorted({token.content for token in added if token.content in (text or "")} - {*self._special})
        self._template = text or ""
        self._reads_parts_alone = bool(text) and reads_parts_alone(tokenizer)
        shown, own = text if self._knows_tools else None, getattr(tokenizer, "response_template", None)
        self._parser = ReplyParser(shown, own, self._special)
        self._grammar = ReplyGrammar(text, reply_fields(shown) or (None if own else HERMES), self._special_id)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        return self.encoded(self.write(messages, tools))

    def write(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> WrittenPrompt:
        """`render` without the tokens; raises as it does."""
        messages, files = self.separated(messages)
        guarded = self.guarded(messages, tools)
        marked = self._apply(guarded.messages, guarded.tools, generation_prompt=True)
        marks = 0 if self._images is None else marked.count(self._images.mark)
        if marks != len(files):
            raise DataError(
                f"The chat template writes {marks} marks for {len(files)} images: put images into messages that "
                "it writes them for (the user's)."
            )
        text = well_formed(guarded.restore(marked))
        return WrittenPrompt(text=text, guarded=guarded, marked=marked, images=tuple(files))

    def separated(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[bytes]]:
        """Returns messages with bare parts in the place of images, and the files of these.

        Raises:
            DataError: an image cannot be read, or none is read here.
        """
        if self._images is not None:
            return without_images(messages)
        if any(map(has_images, messages)):
            raise DataError(
                "A message has an image, but the model is shown none: set --data.image_key in a run, or --engine "
                "embedded or vllm of chat and serve agent, or a server of vllm serve --enable-scale-out, with a model "
                "that sees."
            )
        return messages, []

    def encoded(self, written: WrittenPrompt) -> RenderedPrompt:
        """Returns a prompt with its tokens and images."""
        if self._images is None or not written.images:
            return RenderedPrompt(text=written.text, token_ids=self._encode_guarded(written.guarded, written.marked))
        return self._placed(written.guarded, written.marked, written.images, written.text)

    def _placed(
        self, guarded: Guarded, marked: str, files: Sequence[bytes], text: str, *, earlier: int = 0
    ) -> RenderedPrompt:
        """Returns the tokens of a text with images in the place of the renderer's marks; `earlier` images stand before
        it.

        Raises:
            DataError: there are more marks than images, or fewer, or several of a model that takes one.
        """
        assert self._images is not None
        whole = with_images(self._images, marked, files, earlier=earlier)
        token_ids, borders = self.locate(guarded, whole.text)
        return RenderedPrompt(text=text, token_ids=tuple(token_ids), images=whole.placed(borders))

    def locate_images(
        self, guarded: Guarded, marked: str, files: Sequence[bytes]
    ) -> tuple[list[int], list[tuple[int, int]], ImageText]:
        """Returns the tokens of a text with `files` in the place of its marks, the characters of each token, and the
        text; raises as `write`."""
        if self._images is None:
            whole = ImageText(text=marked, images=(), marks=(), mark=0)
        else:
            whole = with_images(self._images, marked, files)
        token_ids, borders = self.locate(guarded, whole.text)
        return token_ids, borders, whole

    def mentions(self, role: str) -> bool:
        """Returns whether the template names a role; some have roles beside the usual ones."""
        return any(f"{mark}{role}{mark}" in self._template.replace("\\", "") for mark in "'\"")

    def lengths(self, prompts: Sequence[WrittenPrompt]) -> list[int]:
        """Returns the number of tokens of each prompt. All are tokenised in one call, which uses all cores."""
        plain = [prompt.guarded.mark is None and not prompt.images for prompt in prompts]
        whole = iter(
            self._count(
                [p.text for p, is_plain in zip(prompts, plain, strict=True) if is_plain], add_special_tokens=False
            )
        )
        return [
            next(whole) if is_plain else len(self.encoded(prompt).token_ids)
            for prompt, is_plain in zip(prompts, plain, strict=True)
        ]

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
        found = self.continued(messages, new_messages, tools, reply_token_ids=reply_token_ids)
        return None if found is None else found.token_ids

    def continued(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> RenderedPrompt | None:
        """Implements `SeesImages.continued`."""
        files: list[bytes] = []
        earlier = 0
        if self._images is not None:
            earlier = sum(map(image_count, messages))
            messages, (new_messages, files) = [*map(bare, messages)], without_images(new_messages)
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
            return self._rendered(marked, end + following, files, earlier)
        close = last if last in end else max(self._special, key=end.rfind)
        place = end.rfind(close)
        lacking = end[place + len(close) :] if place >= 0 else end
        # In some templates the next turn's mark also ends this turn; the model has then sampled it already.
        added = lacking + (following if last in end else following.removeprefix(last))
        return self._rendered(marked, added, files, earlier)

    def _rendered(self, guarded: Guarded, text: str, files: Sequence[bytes], earlier: int) -> RenderedPrompt:
        if files:
            return self._placed(guarded, text, files, text, earlier=earlier)
        return RenderedPrompt(text=text, token_ids=self._encode_guarded(guarded, text))

    def marked(self, text: str, images: Sequence[Any], *, earlier: int = 0) -> RenderedPrompt:
        """Implements `SeesImages.marked`."""
        if images and self._images is None:
            raise DataError("A text has images, but the run reads none: set --data.image_key.")
        files = [image_bytes(image) for image in images]
        if self._images is not None and not files and self._images.mark in text:
            raise DataError(f"The text has {self._images.mark}, but no image that it stands for.")
        return self._rendered(Guarded([], []), text, files, earlier)

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
    def _behind_reply(self) -> str:
        """Text that the template writes behind a reply; empty if it requires other roles than user and assistant."""
        mark = unused_character([])
        conversation: list[Message] = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        try:
            return self._apply(conversation, [], generation_prompt=False).rpartition(mark)[2]
        except DataError:
            return ""

    @property
    def unknown_end(self) -> str:
        """Text with which the template ends a reply, if there is no token of the tokenizer's own in it; else empty."""
        behind = self._behind_reply.strip() if self._tokenizer.chat_template else ""
        return "" if any(token and token in behind for token in (*self._special, *self._written)) else behind

    @cached_property
    def end_of_turn(self) -> str:
        """Implements `ChatCodec.end_of_turn`; without a chat template it is the tokenizer's end-of-sequence token."""
        closing = self._tokenizer.eos_token or ""
        if not self._tokenizer.chat_template:
            return closing
        behind = self._behind_reply
        written = [token for token in self._special if token and token in behind]
        # The first one ends the turn; a second one (Phi-3's eos) ends the conversation.
        return min(written, key=lambda token: (behind.find(token), -len(token)), default=closing)

    def parse(
        self, text: str, prompt: str, tools: Sequence[ToolSchema] = (), form: ReplyForm | None = None
    ) -> ParsedReply:
        """Implements `ChatCodec.parse`."""
        return self._parser.parse(text, prompt, tools, form)

    def grammar(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Implements `ChatCodec.grammar`."""
        written = json.dumps([form.schema, tools], ensure_ascii=False)
        spelled = next((token for token in self._special if token in written), None)
        if spelled is not None:  # the token would be drawn instead of its text, and may end the reply
            raise DataError(f"The form of the reply cannot be prescribed: it spells out the control token {spelled}.")
        return self._grammar.write(form, prompt, tools)

    def _special_id(self, text: str) -> int | None:
        return int(self._tokenizer.convert_tokens_to_ids(text)) if text in self._special else None

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> TokenStream:
        """Implements `ChatCodec.stream`."""
        return TokenStream(self._tokenizer, self._parser.stream(prompt, tools))

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
        messages = with_mapped_arguments(messages)
        written = list(messages) if self._knows_tools else as_text(messages, tools)
        written = in_parts(written) if self._reads_parts_alone else written
        schemas = list(tools) if self._knows_tools and tools else None
        error: Exception | None = None
        for candidate in (written, with_text_arguments(written)):
            try:
                return render(candidate, schemas)
            except Exception as refused:  # some want calls' arguments as JSON text; its code may raise anything
                error = error or refused
        assert error is not None
        raise DataError(
            f"The model's chat template refuses the messages: {error_text(error)} (change them, or render them "
            f"yourself with --data.apply_chat_template False). They are: {list(messages)!r}."
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
        return TemplateCodec(self._tokenizer, {**self._template_kwargs, **template_kwargs}, self._images)

    def reads(self, variable: str) -> bool:
        """Implements `ChatCodec.reads`."""
        return variable in self._template

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
