"""Equality of rewards, up to the rounding of the numbers that they are made of."""

from collections.abc import Sequence

SAME = 2.0**-21
"""Relative difference within which rewards are equal: that of float32 numbers which have been rounded four times each
(0.1 + 0.2 and 0.3)."""


def differ(values: Sequence[float]) -> bool:
    """Returns whether some of `values` differ by more than rounding.

    >>> differ([0.1 + 0.2, 0.3]), differ([0.0, 1e-7]), differ([1e6, 1e6 + 1]), differ([])
    (False, True, True, False)
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    return high - low > SAME * max(abs(low), abs(high))


def reaches(value: float, least: float) -> bool:
    """Returns whether `value` is `least` or more, but for rounding.

    >>> reaches(0.1 + 0.7, 0.8), reaches(0.8, 0.8), reaches(0.799, 0.8), reaches(-0.8, -0.1 - 0.7)
    (True, True, False, True)
    """
    return value >= least - SAME * abs(least)


def are_apart(low: float, high: float, margin: float) -> bool:
    """Returns whether two values differ by `margin` or more, but for rounding.

    >>> are_apart(0.3, 0.8, 0.5), are_apart(0.2, 0.7, 0.5), are_apart(0.3, 0.7, 0.5)  # 0.7 - 0.2 < 0.5
    (True, True, False)
    """
    return high - low >= margin - SAME * max(abs(low), abs(high))
