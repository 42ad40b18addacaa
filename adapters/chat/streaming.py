"""Text of a reply while its tokens are sampled."""

from collections.abc import Sequence
from typing import Any

from rollgrad.adapters.chat.field_stream import FieldStream
from rollgrad.domain.ports.chat_codec import ReplyStream

UNFINISHED = "\ufffd"
"""Character that a tokenizer writes for an incomplete character, whose last bytes are in tokens still to come."""


class TokenStream(ReplyStream):
    """A `ReplyStream`. Tokens are decoded together with the tokens before them, on which their text depends."""

    def __init__(self, tokenizer: Any, fields: FieldStream) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._tokens: list[int] = []
        self._start = 0
        self._decoded = 0

    def feed(self, token_id: int) -> Sequence[tuple[str, str]]:
        """Implements `ReplyStream.feed`."""
        self._tokens.append(token_id)
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return []
        self._start, self._decoded = self._decoded, len(self._tokens)
        return self._fields.feed(text)

    def finish(self) -> Sequence[tuple[str, str]]:
        """Implements `ReplyStream.finish`."""
        return [*self._fields.feed(self._new_text()), *self._fields.finish()]

    def _new_text(self) -> str:
        known = self._decode(self._tokens[self._start : self._decoded])
        return self._decode(self._tokens[self._start :])[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
