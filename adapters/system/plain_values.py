"""Values as JSON and UTF-8 can hold them."""

import json
import math
from collections.abc import Mapping
from typing import Any


def is_json(value: Any) -> bool:
    """Returns whether JSON can hold a value.

    >>> is_json({"a": [1, None]}), is_json({"a": b"1"})
    (True, False)
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def finite(value: Any) -> Any:
    """Returns None for a number that is infinite or no number at all, and any other value as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_utf8(text: str) -> str:
    r"""Returns a text in which lone halves of surrogate pairs, which UTF-8 cannot hold, are written out.

    >>> as_utf8("\ud800 ä")
    '\\ud800 ä'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def row_as_utf8(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row whose texts are as `as_utf8` returns them, and whose other values are as they are."""
    return {name: as_utf8(value) if isinstance(value, str) else value for name, value in row.items()}


def json_fault(error: Exception) -> str:
    """Returns what `json` says of a text that is one line of a file, without its own count of lines, which begins with
    1 there."""
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
