"""Splits of a dataset, of which a slice may be read, as `datasets` of Hugging Face writes it: `train[:90%]`."""

import re

from attrs import frozen

from rollgrad.domain.errors import DataError
from rollgrad.domain.settings import Range

_SPLIT = re.compile(r"([^\[\]]+)(\[\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\])?")


@frozen
class Split:
    """The split `name`, and the bounds of the slice of its rows, texts: a row's number, or a share of all in percent;
    below 0 they count from the end. None: the slice begins with the first row, or ends with the last."""

    name: str
    first: str | None = None
    last: str | None = None
    sliced: bool = False

    def rows(self, count: int, name: str, flag: str) -> range:
        """Returns the numbers of the rows of the slice, of `count` that the dataset `name` has; shares are rounded to
        whole rows. `flag` sets the split.

        >>> parse_split("train[95%:]").rows(30, "sums.jsonl", "--data.split")
        range(28, 30)

        Raises:
            DataError: there is no such row.
        """
        chosen = range(count)[slice(_place(self.first, count), _place(self.last, count))]
        if not chosen:
            raise DataError(
                f"The slice [{self.first or ''}:{self.last or ''}] of a split has none of the {count} rows of {name}: "
                f"change {flag} (or --eval.split)."
            )
        return chosen


def parse_split(split: str) -> Split:
    """Returns what a setting says.

    Raises:
        ValueError: it is no name, nor a name with a slice.
    """
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise ValueError(f"{split!r} is no split: it must be {SPLIT.rule}.")
    name, slice_, first, last = match.groups()
    return Split(name.strip(), first, last, sliced=slice_ is not None)


def _place(bound: str | None, count: int) -> int | None:
    if bound is None:
        return None
    return round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)


SPLIT = Range(lambda split: _SPLIT.fullmatch(split) is not None, "a name, or one with a slice, as train[:90%]")
"""A split to read."""

SPLIT_HELP = (
    "Split to read, or a slice of its rows: train[:90%], train[90%:], train[:1000]. A file is one split, whatever is "
    "set."
)
"""The description of a setting that is one."""
