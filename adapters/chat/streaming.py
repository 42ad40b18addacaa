"""Text of a reply while its tokens come in."""

from collections.abc import Sequence
from typing import Any

from rollgrad.adapters.chat.field_stream import FieldStream
from rollgrad.domain.ports.chat_codec import ReplyStream

UNFINISHED = "\ufffd"
"""What a tokenizer writes for the first bytes of a character whose last ones are still to come."""


class TokenStream(ReplyStream):
    """See `ReplyStream`. Tokens are decoded together with those before them, since a token's text depends on these."""

    def __init__(self, tokenizer: Any, fields: FieldStream) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._tokens: list[int] = []
        self._start = 0
        self._told = 0

    def feed(self, token_id: int) -> Sequence[tuple[str, str]]:
        """Implements `ReplyStream.feed`."""
        self._tokens.append(token_id)
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return []
        self._start, self._told = self._told, len(self._tokens)
        return self._fields.feed(text)

    def finish(self) -> Sequence[tuple[str, str]]:
        """Implements `ReplyStream.finish`."""
        return [*self._fields.feed(self._new_text()), *self._fields.finish()]

    def _new_text(self) -> str:
        known = self._decode(self._tokens[self._start : self._told])
        return self._decode(self._tokens[self._start :])[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
