"""Port: between chat messages and token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from rollgrad.domain.episodes.messages import Message, ParsedReply

ToolSchema = Mapping[str, Any]
"""A tool in the OpenAI shape: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@frozen(kw_only=True)
class RenderedPrompt:
    """A conversation as the model's template writes it, ready for the model's reply."""

    text: str
    token_ids: tuple[int, ...]


class ReplyStream(Protocol):
    """Promises: what it gives for one field, put together, is that field of the message that `parse` makes of the whole
    reply."""

    def feed(self, token_id: int) -> Sequence[tuple[str, str]]:
        """(field, text) pieces that the next token completes; the field is `content` or `reasoning_content`."""
        ...

    def finish(self) -> Sequence[tuple[str, str]]:
        """What was held back until the end of the reply."""
        ...


@runtime_checkable
class ChatCodec(Protocol):
    """Promises: `render` is pure; tokens that were sampled are never passed back through it; the special tokens of the
    vocabulary, written out inside a message, are plain text."""

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
        """Returns the tokens between a sampled reply and the next one: the end of its turn, as far as `reply_token_ids`
        lacks it, `new_messages` and the generation prompt.

        Args:
            messages: the conversation up to and with the sampled reply, an assistant message.
            new_messages: what follows it.
            tools: as for `render`.
            reply_token_ids: the reply as it was sampled.

        Returns:
            None when the template writes `messages` otherwise once `new_messages` follow (it drops thinking, say), so
            that no such tokens exist.
        """
        ...

    @property
    def end_of_turn(self) -> str:
        """Text of the special token that ends a reply in the chat template (`<|im_end|>`, `<end_of_turn>`); empty
        without one."""
        ...

    def parse(self, text: str, prompt: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        """Takes a reply apart.

        Args:
            text: the reply with its special tokens.
            prompt: the text it follows (it may have opened the thinking).
            tools: those whose calls are looked for, whose schemas give arguments their types.
        """
        ...

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> ReplyStream:
        """Takes a reply apart while it is sampled; arguments as for `parse`."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of plain text, with no template and no special tokens added; those written in it are
        real."""
        ...

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of token ids, without special tokens unless asked for."""
        ...
