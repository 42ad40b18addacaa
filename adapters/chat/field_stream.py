"""`FieldStream` parses a reply piece by piece into the fields of a message.

Invariant: the joined pieces do not depend on how the text was cut. Tool calls come at the end, since only complete ones
can be read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.chat.call_marks import CallMarks
from rollgrad.adapters.chat.special_text import SpecialTokens
from rollgrad.domain.episodes.messages import ToolCall

Pieces = list[tuple[str, str]]
"""Pairs of (field, text); the field is `content` or `reasoning_content`."""

UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
"""Errors that the parser raises on a region that is not in its format."""


class FieldStream:
    """Stream of a reply's fields, without special tokens and outer white space.

    Args:
        parser: transformers' parser.
        special: the tokens to remove.
        read_calls: makes tool calls from the regions that the parser found and the whole reply.
        marks: what the parser is shown of the reply; None for all of it as it is.
    """

    def __init__(
        self,
        parser: Any,
        special: SpecialTokens,
        read_calls: Callable[[Sequence[Any], str], tuple[ToolCall, ...]],
        marks: CallMarks | None = None,
    ) -> None:
        self._parser = parser
        self._special = special
        self._read_calls = read_calls
        self._marks = marks
        self._said: list[str] = []
        self._tails: dict[str, str] = {}
        self._spaces: dict[str, str] = {}
        self._fields_seen: set[str] = set()
        self.failed = False
        """Whether a part could not be read."""
        self.tool_calls: tuple[ToolCall, ...] = ()
        """The calls, after `finish`."""

    def feed(self, text: str) -> Pieces:
        """Returns the pieces of `content` and `reasoning_content` that `text` completes."""
        self._said.append(text)
        if self._marks is not None:
            text = self._marks.feed(text)
        return [] if self.failed else self._guarded(lambda: self._parser.feed(text))

    def finish(self) -> Pieces:
        """Returns the pieces still held back. A reply that could not be parsed at all is content."""
        calls: Sequence[Any] = ()

        def finalize() -> Sequence[Any]:
            nonlocal calls
            held = [] if self._marks is None else self._parser.feed(self._marks.finish())
            message, events = self._parser.finalize()
            calls = message.get("tool_calls") or ()
            return [*held, *events]

        pieces = [] if self.failed else self._guarded(finalize)
        for name, tail in list(self._tails.items()):
            pieces.extend(self._trimmed(name, self._special.remove(tail)))
        whole = "".join(self._said)
        self.tool_calls = self._read_calls(calls, whole)
        unread = all(call.arguments is None for call in self.tool_calls)
        nothing_else = bool(self.tool_calls) or self.failed or "reasoning_content" not in self._fields_seen
        if "content" not in self._fields_seen and unread and nothing_else:
            pieces.extend(self._trimmed("content", self._special.remove(whole).strip()))
        return pieces

    def _guarded(self, advance: Callable[[], Sequence[Any]]) -> Pieces:
        try:
            events = advance()
        except UNREADABLE:
            self.failed = True
            return []
        pieces: Pieces = []
        for event in events:
            name = {"thinking": "reasoning_content"}.get(event["field"], event["field"])
            if event["type"] == "region_chunk" and name in ("content", "reasoning_content"):
                text, self._tails[name] = self._special.remove_settled(self._tails.get(name, "") + event["text"])
                pieces.extend(self._trimmed(name, text))
        return pieces

    def _trimmed(self, name: str, text: str) -> Pieces:
        """Drops leading white space, and holds white space back until other text follows it."""
        whole = self._spaces.get(name, "") + text
        body = whole.rstrip()
        self._spaces[name] = whole[len(body) :]
        if not body:
            return []
        first = name not in self._fields_seen
        self._fields_seen.add(name)
        return [(name, body.lstrip() if first else body)]
