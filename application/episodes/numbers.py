"""Numbers that environments and agents return; one that is not finite fails its own episode, and not the run."""

import math
from collections.abc import Mapping
from typing import Any

from rollgrad.application.foreign import shown
from rollgrad.domain.errors import ForeignError


def returned_number(who: str, what: str, value: Any) -> float:
    """Returns the number `what` that `who` returned; NumPy's and torch's are numbers, texts that spell one are not.

    >>> returned_number("The agent", "reward", True)
    1.0

    Raises:
        ForeignError: it is no finite number.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, of tensors with several numbers
        number = math.nan
    if not math.isfinite(number):
        raise ForeignError(f"{who} returned the {what} {shown(value)}: it must be a finite number.")
    return number


def returned_numbers(who: str, what: str, one: str, values: Any) -> dict[str, float]:
    """Returns the numbers `what` that `who` returned by their names.

    >>> returned_numbers("The agent", "metrics", "metric", {"tries": 2})
    {'tries': 2.0}

    Raises:
        ForeignError: they are no mapping, or `one` of them is no finite number.
    """
    if not isinstance(values, Mapping):
        raise ForeignError(
            f"{who} returned the {what} {shown(values)}: they must be a mapping from names to numbers, or left out."
        )
    return {name: returned_number(who, f"{one} {name}", value) for name, value in values.items()}
