"""Widths of rows that hold sequences of several lengths, the shorter ones filled up."""

from collections.abc import Iterator, Sequence

PADDING_TOLERANCE = 1.3
"""Factor up to which padding may enlarge rows (or score matrices) that share a call."""

SMALL_PASS = 2048
"""Tokens of rows, padding included, up to which padding costs less than another call."""


def row_widths(lengths: Sequence[int], *, one_pass: bool = False) -> Iterator[int]:
    """Yields the width of the row of each sequence; rows of one width share a call.

    Args:
        lengths: lengths of the sequences, the longest first.
        one_pass: whether all rows have one width.
    """
    width, rows, real = max(lengths, default=0), 0, 0
    for length in lengths:
        padded = (rows + 1) * width
        if rows and not one_pass and padded > SMALL_PASS and padded > PADDING_TOLERANCE * (real + length):
            width, rows, real = length, 0, 0
        rows, real = rows + 1, real + length
        yield width
