"""Labelled replies as preference pairs: good replies and bad ones to the same prompt, with the same images and tools.

Does not own: how a pair is read (`formats`).
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.datasets.columns import has_value, value_at
from rollgrad.adapters.data.examples.rows import Rows, column_value, read_label

LABELLED = {"completion", "label"}
"""Columns of labelled replies, besides that of the prompt."""

CONTEXT = ("tools", "chat_template_kwargs", "system")
"""Columns that are of the prompt, too, besides that of its images."""

ALONE = -1


def is_labelled(columns: Set[str], prompt_key: str) -> bool:
    """Returns whether rows with these columns are labelled replies, and no pairs."""
    return columns >= LABELLED | {prompt_key} and not columns & {"chosen", "rejected"}


class JoinedPairs:
    """Pairs of labelled replies; a reply that is left over is a row that cannot be used. The column `prompt_key` has
    the prompt, and all else of a pair's row is its good reply's; `pairs` is the result of `joined`."""

    def __init__(self, rows: Rows, pairs: Any, *, prompt_key: str) -> None:
        self.rows = rows
        self._pairs = pairs
        self._prompt_key = prompt_key

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, second = self._pairs[index].tolist()
        row = self.rows[first]
        if second == ALONE:
            column_value(row, self._prompt_key)
            kind = "bad" if _desirable(row) else "good"
            raise RowError(Reason.LONE, f"No {kind} reply to its prompt is left to compare it with.")
        kept = {name: value for name, value in row.items() if name not in LABELLED}
        replies = (column_value(each, "completion") for each in (row, self.rows[second]))
        return {**kept, **dict(zip(("chosen", "rejected"), replies, strict=True))}

    def row(self, index: int) -> int:
        """Returns the number of the row that has the good reply of pair `index`, or the one that is left over."""
        return int(self._pairs[index, 0])


def joined(rows: Rows, *, prompt_key: str, image_key: str | None, every: bool) -> Any:
    """Returns the rows of each pair, int64 [P, 2], the good reply's first; pairs ascend. Of each prompt the first good
    reply goes with the first bad one, the second with the second, and so on; with `every` each good reply goes with
    each bad one. The second of a reply that is left over is `ALONE`. The column `prompt_key` has the prompt,
    `image_key` its images."""
    context = (*CONTEXT, *([] if image_key is None else [image_key]))
    found: dict[bytes, tuple[list[int], list[int]]] = {}
    pairs: list[tuple[int, int]] = []
    for index in range(len(rows)):
        try:
            row = rows[index]
            prompt, desirable = _asked(row, prompt_key, context), _desirable(row)
        except RowError:  # it is counted when all rows are read
            pairs.append((index, ALONE))
            continue
        found.setdefault(prompt, ([], []))[0 if desirable else 1].append(index)
    for good, bad in found.values():
        if every:
            pairs += itertools.product(good, bad)
            left = [] if good and bad else [*good, *bad]
        else:
            pairs += zip(good, bad, strict=False)
            left = [*good[len(bad) :], *bad[len(good) :]]
        pairs += ((index, ALONE) for index in left)
    return numpy.asarray(sorted(pairs), dtype=numpy.int64).reshape(-1, 2)


def _asked(row: Mapping[str, Any], prompt_key: str, context: Sequence[str]) -> bytes:
    """Returns a hash of the prompt of a row.

    Raises:
        RowError: it has none.
    """
    beside = (value_at(row, column) if has_value(row, column) else None for column in context)
    asked = [column_value(row, prompt_key), *beside]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=_told).encode(errors="surrogatepass")).digest()[:16]


def _desirable(row: Mapping[str, Any]) -> bool:
    """Returns whether the reply of a row is good; raises `RowError` if its label is none."""
    return read_label(column_value(row, "label"), "label")


def _told(value: Any) -> str:
    """Returns a text of what JSON has none for, such as the bytes of an image, or a Pillow image, whose own text is of
    its place in memory."""
    try:
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    except Exception:  # a decoder may raise anything on a broken file, which is told when the row is read
        content = b""
    return f"{getattr(value, 'size', '')} {hashlib.sha256(content).hexdigest()}"
