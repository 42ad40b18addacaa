"""Numbers that environments and agents return; one that is not finite fails its own episode, and not the run."""

import math
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
