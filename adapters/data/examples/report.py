"""The report of a dataset: what was read, what is trained, and every row that is not, by reason.

Invariant: rows read = rows used + rows dropped by reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from attrs import Factory, asdict, define, frozen

from rollgrad.adapters.chat.row_error import Reason
from rollgrad.adapters.chat.training_text import Anomaly
from rollgrad.domain.errors import DataError

PERCENTILES = (50, 90, 99, 100)
"""Percentiles of the rows' lengths; the last is the longest row's."""


@frozen
class Dropped:
    """Rows that are not used for one reason: how many, and where the first stands and what is wrong with it."""

    count: int
    place: str
    example: str


@define(kw_only=True)
class DataReport:
    """Report on the rows of a dataset."""

    rows: int = 0
    used: int = 0
    branches: int = 0
    branched_rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    over_limit: int = 0
    """Rows longer than the limit, whatever became of them."""
    max_tokens: int = 0
    first_rows: bool = False
    """Whether the rows are the first of a stream."""
    also_trained: int = 0
    """Used rows of held-out data that are trained on, too."""
    unread: list[str] = Factory(list)
    """Columns that nothing is read from."""
    dropped: dict[str, Dropped] = Factory(dict)
    anomalies: dict[str, int] = Factory(dict)
    lengths: dict[str, int] = Factory(dict)
    """Percentiles of the tokens of used rows, all branches of a row together."""

    def drop(self, reason: Reason, place: str, sentence: str) -> None:
        """Counts a row that is not used; the first of each reason is the example."""
        before = self.dropped.get(reason.value)
        if before is None:
            self.dropped[reason.value] = Dropped(1, place, sentence)
        else:
            self.dropped[reason.value] = Dropped(before.count + 1, before.place, before.example)

    def notice(self, anomalies: Sequence[Anomaly] | frozenset[Anomaly]) -> None:
        """Counts what was noticed in a used row."""
        self.anomalies = dict(Counter(self.anomalies) + Counter(str(anomaly) for anomaly in anomalies))

    def measure(self, lengths: Sequence[int]) -> None:
        """Fills in the percentiles of the used rows' lengths."""
        if lengths:
            values = numpy.percentile(lengths, PERCENTILES, method="inverted_cdf")
            self.lengths = {f"p{percent}": int(value) for percent, value in zip(PERCENTILES, values, strict=True)}

    @property
    def dropped_rows(self) -> int:
        """Rows that are not used."""
        return sum(drop.count for drop in self.dropped.values())

    def check(self, max_dropped: float, setting: str) -> None:
        """Checks that enough rows are left.

        Raises:
            DataError: none is, or the share of dropped rows exceeds `max_dropped`.
        """
        reasons = "; ".join(
            f"{reason}: {drop.count} ({drop.place}: {drop.example})" for reason, drop in self.dropped.items()
        )
        if not self.used:
            raise DataError(f"No row of {setting} can be used: {reasons}.")
        if self.dropped_rows > max_dropped * self.rows:
            raise DataError(
                f"{self.dropped_rows} of {self.rows} rows of {setting} cannot be used, more than --data.max_dropped "
                f"{max_dropped:g} allows: mend them, or raise it ({reasons})."
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON has it."""
        return asdict(self) | {"dropped_rows": self.dropped_rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "DataReport":
        """Returns the report that `to_json` wrote."""
        known = {key: item for key, item in value.items() if key != "dropped_rows"}
        return cls(**{**known, "dropped": {reason: Dropped(**drop) for reason, drop in known["dropped"].items()}})

    def lines(self) -> list[tuple[str, str]]:
        """Returns what a person wants to know: names and values."""
        lengths = ", ".join(f"{name} {value:,}" for name, value in self.lengths.items())
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        lines = [
            ("rows used", f"{self.used:,} of {'the first ' * self.first_rows}{self.rows:,}"),
            ("tokens", f"{self.tokens:,}, of which {self.trained_tokens:,} are trained ({share:.0%})"),
            ("tokens a row", lengths),
            (f"longer than {self.max_tokens:,}", f"{self.over_limit:,} rows"),
        ]
        if self.unread:
            lines.append(("columns not read", ", ".join(self.unread)))
        if self.branched_rows:
            lines.append(
                ("branches", f"{self.branches:,}: the template rewrites the history of {self.branched_rows:,}")
            )
        if self.also_trained:
            lines.append(("trained on, too", f"{self.also_trained:,} rows, which tell nothing of new ones"))
        lines += [
            (f"dropped: {reason}", f"{drop.count:,} ({drop.place}: {drop.example})")
            for reason, drop in self.dropped.items()
        ]
        lines += [(f"noticed: {name}", f"{count:,} rows") for name, count in self.anomalies.items()]
        return lines
