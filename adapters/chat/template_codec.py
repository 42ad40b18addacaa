"""`TemplateCodec`: the chat template and the tokenizer that come with a model.

Invariant: the template is applied once, to text, and that text is tokenised once without adding special tokens (the
template already wrote them). Does not own: which messages make a prompt.
"""

from collections.abc import Sequence
from typing import Any

from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import ChatCodec, Message, RenderedPrompt


class TemplateCodec(ChatCodec):
    """Renders, encodes and decodes with `tokenizer`, a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message]) -> RenderedPrompt:
        """Applies the chat template, with the generation prompt.

        Raises:
            ConfigurationError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} has no chat template, but prompts are to be "
                "rendered with it: set --data.apply-chat-template False (and --data.input-template for a text around "
                "each prompt)."
            )
        from jinja2 import TemplateError

        # Arrow fills the fields that a message lacks with None; templates take presence for a value.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(present, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise DataError(
                f"The model's chat template refuses the messages {present!r}: {error} "
                "(change the messages, or render them yourself with --data.apply-chat-template False)."
            ) from error
        return RenderedPrompt(text=text, token_ids=self.encode(text))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with no template and no special tokens added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that starts a sequence, with the special tokens this tokenizer adds by default (BOS)."""
        return tuple(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens, spaces untouched."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
