"""Special tokens written out in texts: they become plain text in messages, and are removed from replies.

A template joins messages and its own marks into one string, in which `<|im_end|>` typed by a user looks like the end of
the turn. So each special token that a message or a tool's description writes out is replaced by a placeholder before
the template is applied; afterwards the placeholders' text is tokenised as plain characters. For example, the user text
"a<|im_end|>b" reaches the template as "a", placeholder 0, "b", and the placeholder is tokenised as "<", "|", "im", ...
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen

from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.messages import texts as all_texts
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.chat_codec import ToolSchema

PRIVATE_USE = range(0xE000, 0xF900)
"""Code points without a meaning of their own (Unicode's private use area)."""


@frozen
class Guarded:
    """`messages` and `tools` with placeholders. `mark` is the character around a placeholder, None if there are
    none."""

    messages: list[Message]
    tools: list[ToolSchema]
    mark: str | None = None
    texts: tuple[str, ...] = ()

    def split(self, text: str) -> list[tuple[str, bool]]:
        """`text` in pieces, each with whether it came from a message (and so holds no control token)."""
        return [(part, literal) for part, literal, _ in self.pieces(text)]

    def pieces(self, text: str) -> list[tuple[str, bool, int]]:
        """`split`, each piece also with the number of characters that it takes in `text`."""
        if self.mark is None:
            return [(text, False, len(text))]
        parts: list[tuple[str, bool, int]] = []
        for index, piece in enumerate(re.split(f"{self.mark}([0-9]+){self.mark}", text)):
            literal = bool(index % 2)
            part = self.texts[int(piece)] if literal else piece
            if part:
                parts.append((part, literal, len(piece) + 2 * len(self.mark) * literal))
        return parts

    def restore(self, text: str) -> str:
        """Returns `text` with the original text in place of the placeholders."""
        return "".join(part for part, _ in self.split(text))


def guard(
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    special_tokens: Sequence[str],
    template_tokens: Sequence[str] = (),
) -> Guarded:
    """Returns `messages` and `tools` with placeholders for `special_tokens` in all their texts, and for
    `template_tokens` in all but the assistant's: by those templates find the assistant's thinking."""
    every = _pattern((*special_tokens, *template_tokens))
    messages = [_with_whole_tokens(message, every) for message in messages]
    written = "\n".join(all_texts([messages, tools]))
    if not every.search(written):
        return Guarded(list(messages), list(tools))
    mark = unused_character([messages, tools])
    own, others = _pattern(tuple(special_tokens)), every
    texts: dict[str, int] = {}

    def placeholder(match: re.Match[str]) -> str:
        return f"{mark}{texts.setdefault(match.group(), len(texts))}{mark}"

    def walk(value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {walk(key, pattern): walk(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, pattern) for item in value]
        return value

    walked = [walk(message, own if message.get("role") == "assistant" else others) for message in messages]
    return Guarded(walked, walk(list(tools), others), mark, tuple(texts))


def _with_whole_tokens(message: Message, pattern: re.Pattern[str]) -> Message:
    """Returns a message whose parts do not divide a token among them: templates write texts that follow each other as
    one, some without the spaces around each. Such texts become one part."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for is_text, run in itertools.groupby(content, _is_text):
        own = list(run)
        texts = [part["text"] for part in own] if is_text else []
        found = sum(len(pattern.findall(text)) for text in texts)
        for whole in ("".join(texts), "".join(map(str.strip, texts))):
            if len(pattern.findall(whole)) > found:
                own = [{**own[0], "text": "".join(texts)}]
                break
        parts += own
    return {**message, "content": parts}


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


@lru_cache  # conversations of a run have the same tokens
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of any of `tokens`, the longest first; without tokens it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def unused_character(value: Any) -> str:
    """Returns a private-use character that no text in `value` has.

    Raises:
        DataError: the texts use all of them.
    """
    used = set("".join(text for text in all_texts(value) if not text.isascii()))
    mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
    if mark is None:
        raise DataError("The messages use every private-use character: none is left to mark special tokens with.")
    return mark


class SpecialTokens:
    """Removes `tokens` from texts, in one pass from left to right, the longest first."""

    def __init__(self, tokens: Sequence[str]) -> None:
        known = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._beginnings = {token[:length] for token in known for length in range(1, len(token))}
        self._longest = max(map(len, known), default=0)

    def remove(self, text: str) -> str:
        """Returns `text` without the tokens."""
        return self._pattern.sub("", text)

    def remove_settled(self, text: str) -> tuple[str, str]:
        """Returns `text` without the tokens up to the point where more text could complete one, and the rest
        unchanged."""
        kept: list[str] = []
        place = 0
        while True:
            nearest = max(place, len(text) - self._longest + 1)
            hold = next((i for i in range(nearest, len(text)) if text[i:] in self._beginnings), len(text))
            match = self._pattern.search(text, place)
            if match is None or match.start() >= hold:
                return "".join([*kept, text[place:hold]]), text[hold:]
            kept.append(text[place : match.start()])
            place = match.end()
