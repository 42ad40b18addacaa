"""Parses the results of agent files: mappings with numbers, plain or in tensors or lists.

Errors are `ValueError`: an unreadable result fails its own episode only.
"""

import math
from collections.abc import Mapping
from typing import Any


def required(answer: Any, key: str, method: str) -> Any:
    """Returns `answer[key]`.

    Raises:
        ValueError: `answer`, the result of `method`, is no mapping, or has no such key.
    """
    if not isinstance(answer, Mapping):
        raise ValueError(f"{method} returned {type(answer).__name__}, but it must return a dict with {key!r}")
    if answer.get(key) is None:
        raise ValueError(
            f"{method} returned a dict without {key!r} (it has {', '.join(map(str, answer)) or 'nothing'})"
        )
    return answer[key]


def number(value: Any, what: str) -> float:
    """Returns a number, or the one number in a tensor, array or list.

    Raises:
        ValueError: there is not exactly one number, or it is not finite.
    """
    items = value.reshape(-1).tolist() if hasattr(value, "reshape") else value
    if isinstance(items, list | tuple):
        if len(items) != 1:
            raise ValueError(f"{what} has {len(items)} numbers, but one episode takes one")
        (items,) = items
    try:
        result = float(items)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {value!r}, which is no number") from None
    if not math.isfinite(result):
        raise ValueError(f"{what} is {result}: it must be finite")
    return result


def metrics(logs: Any) -> dict[str, float]:
    """Returns the numbers in `extra_logs`; of a list the first.

    Raises:
        ValueError: a value is no number.
    """
    found: dict[str, float] = {}
    for key, value in (logs or {}).items():
        items = value.reshape(-1).tolist() if hasattr(value, "reshape") else value
        first = items[0] if isinstance(items, list | tuple) and items else items
        found[str(key)] = number(first, f"extra_logs[{key!r}]")
    return found
