"""Keeps what people and tools wrote from turning into control tokens.

A template puts a message's text and its own marks into one string, where `<|im_end|>` typed by a user looks like the
end of the turn. Here each special token that a message spells out is replaced by a placeholder before the template
sees it; afterwards the placeholders' text is tokenised as plain characters.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.errors import DataError
from rollgrad.domain.messages import Message

PRIVATE_USE = range(0xE000, 0xF900)
"""Code points without a meaning of their own (Unicode's private use area)."""


@frozen
class Guarded:
    """`messages` with placeholders; `mark` delimits them, None when nothing had to be replaced."""

    messages: list[Message]
    mark: str | None
    texts: tuple[str, ...] = ()

    def split(self, text: str) -> list[tuple[str, bool]]:
        """`text` in pieces, each with whether it came from a message (and so holds no control token)."""
        if self.mark is None:
            return [(text, False)]
        pieces = re.split(f"{self.mark}([0-9]+){self.mark}", text)
        parts = [(self.texts[int(p)] if i % 2 else p, bool(i % 2)) for i, p in enumerate(pieces)]
        return [(part, literal) for part, literal in parts if part]

    def restore(self, text: str) -> str:
        """`text` with the messages' own words in place of the placeholders."""
        return "".join(part for part, _ in self.split(text))


def guard(messages: Sequence[Message], special_tokens: Sequence[str]) -> Guarded:
    """Replaces every one of `special_tokens` in the texts of `messages`."""
    written = json.dumps(list(messages), ensure_ascii=False, default=str)
    if not any(token in written for token in special_tokens):
        return Guarded(list(messages), None)
    mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in written), None)
    if mark is None:
        raise DataError("The messages use every private-use character: none is left to mark special tokens with.")
    longest_first = sorted(special_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(re.escape(token) for token in longest_first))
    texts: dict[str, int] = {}

    def placeholder(match: re.Match[str]) -> str:
        return f"{mark}{texts.setdefault(match.group(), len(texts))}{mark}"

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {walk(key): walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return value

    return Guarded([walk(message) for message in messages], mark, tuple(texts))
