"""Port: between chat messages and token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

Message = Mapping[str, Any]
"""An OpenAI-style chat message: `role` and `content`, and what the template knows beyond."""


@frozen(kw_only=True)
class RenderedPrompt:
    """A conversation as the model's template writes it, ready for the model's reply."""

    text: str
    token_ids: tuple[int, ...]


@runtime_checkable
class ChatCodec(Protocol):
    """Promises: `render` is pure; tokens that were sampled are never passed back through it."""

    def render(self, messages: Sequence[Message]) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with no template and no special tokens added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        ...
