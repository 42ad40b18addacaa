"""Rows of ranked replies: the best against the worst is a preference pair, or each better one against each worse.

Does not own: how a pair is read (`pairs`).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.rows import Rows, broken, read_number
from rollgrad.application.foreign import shown

REPLIES: Mapping[str, str] = {"completions": "completion", "answers": "answer"}
"""Columns with ranked replies, and the key of a reply in each: of NeMo-RL's data and of Nectar."""
PROMPTS: Mapping[str, str] = {"completions": "context", "answers": "prompt"}
"""Column of their prompt."""


def ranked_column(columns: Mapping[str, Any] | set[str]) -> str | None:
    """Returns the column with ranked replies; None if a row with these columns has none, or already has a pair."""
    if "chosen" in columns or "rejected" in columns:
        return None
    return next((name for name, prompt in PROMPTS.items() if name in columns and prompt in columns), None)


def best_and_worst(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Returns the row as a pair, with `prompt`, `chosen` and `rejected`: the first reply of the lowest rank, and the
    last of the highest.

    Raises:
        RowError: there are no two replies of different ranks, or one is not as ranked replies are.
    """
    replies = _by_rank(row, column)
    return _pair(row, column, replies[0][1], replies[-1][1])


def all_pairs(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """Returns a row for each two replies of different ranks, as `best_and_worst` does for the best and the worst."""
    replies = _by_rank(row, column)
    return [
        _pair(row, column, better, worse)
        for (rank, better), (other, worse) in itertools.combinations(replies, 2)
        if rank < other
    ]


class RankedPairs:
    """Rows of a dataset, in which each two ranked replies of different ranks are a row of their own; `ends` is the
    result of `pair_ends`."""

    def __init__(self, rows: Rows, ends: Any) -> None:
        self.rows = rows
        self._ends = ends

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row_index = self.row(index)
        row = self.rows[row_index]
        column = ranked_column(row)
        return row if column is None else all_pairs(row, column)[index - int(self._ends[row_index])]

    def row(self, index: int) -> int:
        """Returns the number of the row that has pair `index`."""
        return int(numpy.searchsorted(self._ends, index, side="right"))


def pair_ends(rows: Rows) -> Any:
    """Returns for each row how many pairs it and all rows before it make, int64; one that cannot be used is one."""

    def count(index: int) -> int:
        try:
            row = rows[index]
            column = ranked_column(row)
            return 1 if column is None else len(all_pairs(row, column))
        except RowError:  # it is counted when all rows are read
            return 1

    return numpy.cumsum([count(index) for index in range(len(rows))], dtype=numpy.int64)


def _by_rank(row: Mapping[str, Any], column: str) -> list[tuple[float, Any]]:
    """Returns the ranks and the replies, the best first.

    Raises:
        RowError: there are no two replies of different ranks, or one is not as ranked replies are.
    """
    key, replies = REPLIES[column], row[column]
    if isinstance(replies, str | Mapping) or not isinstance(replies, Sequence):
        raise broken(f"{column} holds {shown(replies)}, which is no list of replies.")
    ranked = []
    for reply in replies:
        if not isinstance(reply, Mapping) or reply.get(key) is None or reply.get("rank") is None:
            raise broken(f"{column} holds {shown(reply)}: a ranked reply has {key} and rank.")
        ranked.append((read_number(reply["rank"], "rank"), reply[key]))
    if len({rank for rank, _ in ranked}) < 2:
        raise RowError(Reason.TIED, f"No reply of {column} has a better rank than another.")
    return sorted(ranked, key=lambda reply: reply[0])


def _pair(row: Mapping[str, Any], column: str, chosen: Any, rejected: Any) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name != column}  # the prompt's column may be named
    return {**kept, "prompt": row[PROMPTS[column]], "chosen": chosen, "rejected": rejected}
