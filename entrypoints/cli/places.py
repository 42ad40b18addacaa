"""Takes the words that belong to no flag, such as the directory of a run, out of a command line."""

from collections.abc import Mapping, Sequence
from typing import Any


def take_places(words: Sequence[str], kinds: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the words that belong to no flag, in front of flags or after them, and the others. `kinds` are the types
    of the flags; one of a boolean has a value only where that is True or False.

    >>> take_places(["--json", "runs/first"], {"json": bool}), take_places(["a", "--port", "0", "b"], {"port": int})
    ((['runs/first'], ['--json']), (['a', 'b'], ['--port', '0']))
    """
    places: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            places.append(word)
            continue
        others.append(word)
        boolean = kinds.get(word.removeprefix("--").replace("-", "_"), bool) is bool
        valued = bool(left) and "=" not in word and not left[0].startswith("--")
        if valued and (not boolean or left[0].lower() in ("true", "false")):
            others.append(left.pop(0))
    return places, others
