"""Port: converts chat messages to token ids and back."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message, ParsedReply, ReplyForm

ToolSchema = Mapping[str, Any]
"""A tool in the OpenAI shape: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@frozen(kw_only=True)
class RenderedPrompt:
    """A conversation as the model's template writes it, ready for the model's reply; `images` are those that some of
    the tokens stand for."""

    text: str
    token_ids: tuple[int, ...]
    images: PlacedImages = ()


class ReplyStream(Protocol):
    """Parses a reply while it is sampled. Promises: the pieces of a field, joined, are that field of the message that
    `ChatCodec.parse` returns for the whole reply."""

    def feed(self, token_id: int) -> Sequence[tuple[str, str]]:
        """Returns the (field, text) pieces that the next token completes; the field is `content` or
        `reasoning_content`."""
        ...

    def finish(self) -> Sequence[tuple[str, str]]:
        """Returns the pieces that were held back until the end of the reply."""
        ...


@runtime_checkable
class ChatCodec(Protocol):
    """A chat template with its tokenizer. Promises: `render` is pure; sampled tokens never pass through it again;
    special tokens that are written out inside a message are plain text."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt.

        Raises:
            DataError: the template refuses the messages.
        """
        ...

    def extend(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> tuple[int, ...] | None:
        """Returns the tokens between a sampled reply and the next one: the end of the reply's turn, as far as
        `reply_token_ids` lacks it, then `new_messages`, then the generation prompt.

        Args:
            messages: the conversation up to the sampled reply, an assistant message, which is included.
            new_messages: the messages that follow it.
            tools: as for `render`.
            reply_token_ids: the reply as it was sampled.

        Returns:
            The tokens, or None if the template writes `messages` differently once `new_messages` follow (it drops
            thinking, for example), so that there are no such tokens.
        """
        ...

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables that the chat template is given, besides the conversation and its tools."""
        return {}

    def reads(self, variable: str) -> bool:
        """Returns whether the chat template reads a variable of that name."""
        return False

    @property
    def end_of_turn(self) -> str:
        """Text of the special token that ends a reply in the chat template (`<|im_end|>`, `<end_of_turn>`); empty
        without one."""
        ...

    def parse(
        self, text: str, prompt: str, tools: Sequence[ToolSchema] = (), form: ReplyForm | None = None
    ) -> ParsedReply:
        """Parses a reply.

        Args:
            text: the reply with its special tokens.
            prompt: the text before it (which may have opened the thinking).
            tools: tools that may be called; their schemas give arguments their types.
            form: the form that was prescribed, if any.
        """
        ...

    def grammar(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Returns the grammar (`SamplingParams.grammar`) of the replies of a form; other arguments as for `parse`.

        Raises:
            DataError: a schema cannot be followed, or this model's replies cannot be given the form.
        """
        ...

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> ReplyStream:
        """Returns a parser for a reply that is still being sampled; arguments as for `parse`."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of plain text, with no template and no special tokens added; those written in it are
        real."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text that starts a sequence, with the special tokens that begin one."""
        ...

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of token ids, without special tokens unless asked for."""
        ...


@runtime_checkable
class SeesImages(Protocol):
    """A codec of a model that sees images, in messages after the first reply, too."""

    def continued(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> RenderedPrompt | None:
        """Returns what `ChatCodec.extend` does, with the images of `new_messages`; their places are counted from the
        first of the tokens.

        Raises:
            DataError: an image cannot be read.
        """
        ...

    def marked(self, text: str, images: Sequence[Any], *, earlier: int = 0) -> RenderedPrompt:
        """Returns the tokens of a text in which special tokens are real; the model's marks of images in it stand for
        `images`, in their order. `earlier` images stand before the text.

        Raises:
            DataError: an image cannot be read, or there are more marks than images, or fewer.
        """
        ...
