"""Text of a reply while its tokens come in."""

from collections.abc import Sequence
from typing import Any

from rollgrad.adapters.chat.reply_parser import FieldStream
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
        """See `ReplyStream.feed`."""
        self._tokens.append(token_id)
        known, now = self._decode(self._tokens[self._start : self._told]), self._decode(self._tokens[self._start :])
        if now.endswith(UNFINISHED):
            return []
        self._start, self._told = self._told, len(self._tokens)
        return self._fields.feed(now[len(known) :])

    def finish(self) -> Sequence[tuple[str, str]]:
        """See `ReplyStream.finish`."""
        return self._fields.finish()

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
