"""Says what a flag takes, where tyro says what of Python went wrong with its value."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

ABOUT_A_FLAG = re.compile(r"(?:Error parsing|Missing value for argument) '?--([\w.]+)")
"""Beginnings of tyro's sentences about a value that cannot be read."""


def wrong_value(sentence: str, words: Sequence[str], kinds: Mapping[str, Any]) -> str:
    """Returns a sentence about the flag of which tyro's `sentence` is: its value, and what it takes; tyro's own where
    it is about something else.

    Args:
        sentence: tyro's.
        words: the command line.
        kinds: types of the flags, by their names.
    """
    about = ABOUT_A_FLAG.match(sentence)
    if about is None or about[1] not in kinds:
        return sentence
    flag = f"--{about[1]}"
    takes = described(kinds[about[1]])
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == flag), len(words))
    _, equals, value = words[place].partition("=") if place < len(words) else ("", "", "")
    values = [value] if equals else list(takewhile(lambda word: not word.startswith("--"), words[place + 1 :]))
    if not values:
        return f"{flag} has no value, but it takes {takes}: write it behind the flag."
    return f"{flag} is {' '.join(values)!r}, but it takes {takes}: change {flag}."


def described(kind: Any) -> str:
    """Returns what a flag of this type takes on a command line.

    >>> described(int | None), described(tuple[float, float])
    ('an integer, or None', '2 numbers with spaces between')
    """
    if isinstance(kind, UnionType):
        own = [part for part in get_args(kind) if part is not NoneType]
        return " or ".join(map(described, own)) + (", or None" if len(own) < len(get_args(kind)) else "")
    if get_origin(kind) is tuple:
        first, last = get_args(kind)[0], get_args(kind)[-1]
        count = "" if last is Ellipsis else f"{len(get_args(kind))} "
        return f"{count}{'numbers' if first is float else 'words'} with spaces between"
    if get_origin(kind) is dict:
        value = "number" if get_args(kind)[1] is float else "value"
        return f"pairs of a name and a {value}, with spaces between"
    return {int: "an integer", float: "a number", Path: "a path"}.get(kind, "a word (quote what has spaces)")
