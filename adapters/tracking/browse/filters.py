"""Filters of rollouts: a small language, parsed here and computed by Arrow's kernels; nothing is evaluated as code.

    reward < 0.5 and (turns > 3 or stop_reason = length) and not response contains "sorry"

Where a column is null, a comparison is neither true nor false, and the row does not match.
"""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from rollgrad.domain.errors import FilterError

if TYPE_CHECKING:
    import pyarrow

MOST_CHARACTERS = 2000
DEEPEST = 50
"""Most characters and deepest nesting of a filter: more than anybody writes, less than Python's stack holds."""

COMPARISONS = {
    "=": "equal",
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
"""Operators, and the kernels that compute them."""

EXAMPLES = (
    ("reward < 0.5 and turns > 3", "comparisons, joined by and, or, not and parentheses"),
    ('response contains "sorry"', "a part of a text, in small or capital letters"),
    ('"sorry"', "the same in prompt or response"),
    ("stop_reason in (length, timeout)", "one of several values"),
    ("failure is not null", "failed episodes"),
    ("step >= 10 and step <= 20", "a range of steps"),
    ("part.format = 0", "a named part of the reward; metric.NAME likewise"),
    ("star or tag = hack", "what was starred or tagged"),
    ("zero_spread", "groups that taught nothing, as all their replies had the same reward"),
)
"""Filters that the page shows, and what each chooses."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])
    |(?P<word>[^\W\d][\w.\-/]*)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<sign><=|>=|==|!=|[=<>(),]))""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"and", "or", "not", "in", "contains", "is", "null"})


class Kind(StrEnum):
    """Content of a column."""

    NUMBER = "number"
    INTEGER = "integer"
    TEXT = "text"
    FLAG = "flag"
    TEXTS = "texts"
    """Several texts, such as tags."""


class Columns(Protocol):
    """Rows that a filter is applied to."""

    def column(self, name: str) -> "pyarrow.ChunkedArray":
        """Returns a column by its name."""
        ...

    def containing(self, name: str, part: str) -> "pyarrow.ChunkedArray":
        """Returns for each row whether a column of texts contains a part, in small or capital letters; null if the row
        has no text there."""
        ...


Condition = Callable[[Columns], Any]
"""Returns a boolean for each row."""


@frozen
class Filter:
    """A parsed filter. `condition` returns a boolean for each row, and `searches` are the texts that it looks for,
    once each: a column and a part of its texts."""

    condition: Condition
    searches: tuple[tuple[str, str], ...] = ()


@frozen
class _Token:
    kind: str
    text: str
    place: int  # of its first character, from 1


def parse_filter(text: str, kinds: Mapping[str, Kind]) -> Filter | None:
    """Returns what a filter states; None for an empty one, which all rows match.

    Args:
        text: the filter.
        kinds: what each column holds that it may name.

    Raises:
        FilterError: one sentence says what is wrong, and where.
    """
    if len(text) > MOST_CHARACTERS:
        raise FilterError(f"The filter has {len(text)} characters, and at most {MOST_CHARACTERS} are read: shorten it.")
    tokens = _tokens(text)
    return _Parser(tokens, kinds).whole() if len(tokens) > 1 else None


def _tokens(text: str) -> list[_Token]:
    tokens, place = [], 0
    end = len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            start = place + len(text[place:]) - len(text[place:].lstrip())
            if text[start] in "\"'":
                raise FilterError(
                    f"The filter's text at character {start + 1} has no end: close it with {text[start]}."
                )
            raise FilterError(
                f"The filter has {text[start]!r} at character {start + 1}, which is no part of one: write columns, "
                "comparisons, and texts in quotes."
            )
        assert match.lastgroup is not None
        tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1))
        place = match.end()
    return [*tokens, _Token("end", "", end + 1)]


class _Parser:
    def __init__(self, tokens: list[_Token], kinds: Mapping[str, Kind]) -> None:
        self._tokens = tokens
        self._kinds = kinds
        self._next = 0
        self._depth = 0
        self._searches: list[tuple[str, str]] = []

    def whole(self) -> Filter:
        condition = self._or()
        if self._token.kind != "end":
            raise self._error("and, or or the end")
        return Filter(condition, tuple(dict.fromkeys(self._searches)))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _takes(self, *words: str) -> str | None:
        """Takes the next token if it is one of these words or signs."""
        token = self._token
        if token.kind in ("word", "sign") and token.text.lower() in words:
            self._next += 1
            return token.text.lower()
        return None

    def _error(self, wanted: str) -> FilterError:
        token = self._token
        found = "ends" if token.kind == "end" else f"has {token.text} at character {token.place}"
        return FilterError(f"The filter {found}, where {wanted} is expected.")

    def _or(self) -> Condition:
        import pyarrow.compute as pc

        self._depth += 1
        if self._depth > DEEPEST:
            raise FilterError(
                f"The filter nests more than {DEEPEST} levels deep: write it without so many parentheses."
            )
        condition = self._and()
        while self._takes("or"):
            condition = _both(pc.or_kleene, condition, self._and())
        self._depth -= 1
        return condition

    def _and(self) -> Condition:
        import pyarrow.compute as pc

        condition = self._not()
        while self._takes("and"):
            condition = _both(pc.and_kleene, condition, self._not())
        return condition

    def _not(self) -> Condition:
        import pyarrow.compute as pc

        negated = False
        while self._takes("not"):
            negated = not negated
        condition = self._single()
        return (lambda columns: pc.invert(condition(columns))) if negated else condition

    def _single(self) -> Condition:
        if self._takes("("):
            condition = self._or()
            if not self._takes(")"):
                raise self._error(")")
            return condition
        token = self._token
        if token.kind == "text":
            return self._anywhere(_unquoted(self._take().text))
        if token.kind != "word" or token.text.lower() in _KEYWORDS:
            raise self._error("a column")
        self._take()
        if token.text == "text":
            if not self._takes("contains"):
                raise self._error("contains")
            return self._anywhere(self._text())
        return self._about(token.text, self._kind(token))

    def _kind(self, token: _Token) -> Kind:
        kind = self._kinds.get(token.text)
        if kind is None:
            near = get_close_matches(token.text, self._kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(self._kinds))}."
            raise FilterError(f'The filter has no column "{token.text}" at character {token.place}: {hint}')
        return kind

    def _about(self, name: str, kind: Kind) -> Condition:
        """Parses what is said of a column."""
        import pyarrow.compute as pc

        if self._takes("is"):
            negated = self._takes("not")
            if not self._takes("null"):
                raise self._error("null")
            return lambda columns: (pc.is_valid if negated else pc.is_null)(columns.column(name))
        if self._takes("contains"):
            if kind is not Kind.TEXT:
                raise FilterError(f"The filter asks what {name} contains, which is no text: compare it with = or <.")
            return self._contains(name, self._text())
        if self._takes("in"):
            values = self._values(name, kind)
            return lambda columns: _any([_compared(columns.column(name), kind, "=", value) for value in values])
        operator = self._takes(*COMPARISONS)
        if operator is None:
            if kind is Kind.FLAG:
                return lambda columns: columns.column(name)
            raise self._error("a comparison")
        if kind in (Kind.FLAG, Kind.TEXTS) and operator not in ("=", "==", "!="):
            raise FilterError(f"The filter compares {name} by {operator}, but it has no order: compare it by = or !=.")
        value = self._value(name, kind)
        return lambda columns: _compared(columns.column(name), kind, operator, value)

    def _anywhere(self, part: str) -> Condition:
        found = [self._contains(name, part) for name in ("prompt", "response")]
        return lambda columns: _any([each(columns) for each in found])

    def _contains(self, name: str, part: str) -> Condition:
        import pyarrow.compute as pc

        self._searches.append((name, part))
        return lambda columns: pc.fill_null(columns.containing(name, part), False)

    def _values(self, name: str, kind: Kind) -> list[Any]:
        if not self._takes("("):
            raise self._error("(")
        values = [self._value(name, kind)]
        while self._takes(","):
            values.append(self._value(name, kind))
        if not self._takes(")"):
            raise self._error(", or )")
        return values

    def _value(self, name: str, kind: Kind) -> Any:
        token = self._token
        if kind in (Kind.NUMBER, Kind.INTEGER):
            if token.kind != "number":
                raise self._error(f"a number, as {name} is one,")
            return float(self._take().text)
        if kind is Kind.FLAG:
            word = self._takes("true", "false")
            if word is None:
                raise self._error("true or false")
            return word == "true"
        return self._text()

    def _text(self) -> str:
        token = self._token
        if token.kind == "text":
            return _unquoted(self._take().text)
        if token.kind in ("word", "number") and token.text.lower() not in _KEYWORDS:
            return self._take().text
        raise self._error("a text in quotes")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)


def _both(kernel: Callable[[Any, Any], Any], first: Condition, second: Condition) -> Condition:
    return lambda columns: kernel(first(columns), second(columns))


def _any(found: list[Any]) -> Any:
    import pyarrow.compute as pc

    matches = found[0]
    for other in found[1:]:
        matches = pc.or_kleene(matches, other)
    return matches


def _compared(values: Any, kind: Kind, operator: str, value: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind is Kind.TEXTS:
        among = pa.chunked_array([pa.array([value in (texts or ()) for texts in values.to_pylist()], type=pa.bool_())])
        return pc.invert(among) if operator == "!=" else among
    return pc.call_function(COMPARISONS[operator], [values, pa.scalar(value)])
