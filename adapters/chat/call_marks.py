"""`CallMarks` lets a call in Hermes' format hold the marks of calls in its texts: the parser ends a call at the first.

Invariant: the joined result does not depend on how the text was cut, and each character is looked at once.
"""

import json
import re
from contextlib import suppress

CALL, THOUGHT = "<tool_call>", "<think>"
OPENS = re.compile(f"{CALL}|{THOUGHT}")
THOUGHT_ENDS = "</think>"
MARK = re.compile(r"<(/?tool_call>)")
SPECIAL = re.compile(r'["\\{}\[\]<]')
"""Characters that say where in a JSON value one is."""


class CallMarks:
    """Passes a reply on piece by piece. In the texts of a call's JSON, `<` of a mark becomes `\\u003c`, which is as
    good there; a call is held back until its JSON ends, or is found to be none, and then passed on as it is.

    Args:
        thinks: whether the reply begins with a thought, in which nothing is a call.
    """

    def __init__(self, *, thinks: bool) -> None:
        self._text = ""
        self._inside = THOUGHT if thinks else ""
        """The opening that the text follows: a thought's, a call's or none."""
        self._place = self._depth = 0
        self._quoted = False

    def feed(self, text: str) -> str:
        """Returns what is certain of the reply with `text` after it."""
        self._text += text
        parts = []
        while (part := self._next()) is not None:
            parts.append(part)
        return "".join(parts)

    def finish(self) -> str:
        """Returns what was held back."""
        rest, self._text = self._text, ""
        return rest

    def _next(self) -> str | None:
        """Returns the next piece; None if the text ends before anything is certain."""
        if self._inside == CALL:
            return self._call()
        if self._inside == THOUGHT:
            end = self._text.find(THOUGHT_ENDS)
            if end < 0:
                return self._taken(self._until_mark(THOUGHT_ENDS))
            self._inside = ""
            return self._taken(end + len(THOUGHT_ENDS))
        found = OPENS.search(self._text)
        if found is None:
            return self._taken(self._until_mark(CALL, THOUGHT))
        self._inside = found[0]
        self._place, self._depth, self._quoted = 0, 0, False
        return self._taken(found.end())

    def _call(self) -> str | None:
        """Returns a call's JSON object; or nothing of a text that is none, which is then no call's."""
        space = len(self._text) - len(self._text.lstrip())
        if space or not self._text:
            return self._taken(space)
        if self._text[0] != "{":
            self._inside = ""
            return ""
        while found := SPECIAL.search(self._text, self._place):
            character, self._place = found[0], found.end()
            if self._quoted:
                if character == "\\":
                    if self._place == len(self._text):
                        self._place -= 1  # what it escapes is still to come
                        return None
                    self._place += 1
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "\\<":
                break
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    self._inside = ""
                    return self._escaped(self._taken(self._place) or "")
        else:
            self._place = len(self._text)
            return None
        self._inside = ""
        return ""

    @staticmethod
    def _escaped(text: str) -> str:
        with suppress(ValueError, RecursionError):
            value, end = json.JSONDecoder(strict=False).raw_decode(text)
            if "name" in value and end == len(text):
                return MARK.sub(r"\\u003c\1", text)
        return text

    def _until_mark(self, *marks: str) -> int:
        """Returns where the text ends, or where the last characters may begin one of the marks."""
        last = self._text.rfind("<")
        begun = last >= 0 and any(mark.startswith(self._text[last:]) for mark in marks)
        return last if begun else len(self._text)

    def _taken(self, stop: int) -> str | None:
        """Returns the text up to `stop`, which is then passed on; None if that is nothing."""
        taken, self._text = self._text[:stop], self._text[stop:]
        return taken or None
