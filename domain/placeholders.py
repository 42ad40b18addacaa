"""Texts with places for others: `{name}` is one, `{{name}}` the text {name}, and other braces are plain text."""

import re
from collections.abc import Callable

_PLACE = re.compile(r"\{(\{?)([A-Za-z_][A-Za-z0-9_]*)\}(\}?)")


def places(text: str) -> set[str]:
    """Returns the names of the places in a text.

    >>> sorted(places("{prompt} {{label}} {x: 1} {hint}"))
    ['hint', 'prompt']
    """
    return {name for opening, name, closing in _PLACE.findall(text) if not (opening and closing)}


def filled(text: str, value: Callable[[str], str]) -> str:
    """Returns a text with `value(name)` at each place.

    >>> filled("{prompt} {{label}} {x: 1}", str.upper)
    'PROMPT {label} {x: 1}'
    """

    def fill(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        return f"{{{name}}}" if opening and closing else f"{opening}{value(name)}{closing}"

    return _PLACE.sub(fill, text)
