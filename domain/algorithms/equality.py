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
