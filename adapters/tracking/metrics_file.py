"""Reading `metrics.jsonl`, also while a run writes it, and with lines that a crash or a full disk broke."""

import json
import math
from collections.abc import Mapping, Sequence
from operator import lt
from pathlib import Path
from typing import Any

from attrs import frozen

Series = dict[int, float]
"""Values of one metric by step."""

REMEMBERED = 4096
"""Last bytes of what was read, by which the same file is known."""

MOST_NAMED = 3
"""Numbers of broken lines that a sentence names."""


@frozen(kw_only=True)
class LoggedMetrics:
    """Values of each metric by step, ascending; null where a number was not finite. A step that was logged twice, by a
    continued run, has its last values. `broken`: numbers of lines, from 1, that cannot be read. `replaced`: how often
    the reader has found another file in the place of the one before, whose values are not here."""

    series: Mapping[str, dict[int, float | None]]
    broken: tuple[int, ...]
    replaced: int = 0

    @property
    def last_step(self) -> int:
        """The greatest step; 0 without any."""
        return max((next(reversed(values)) for values in self.series.values() if values), default=0)

    @property
    def known(self) -> dict[str, Series]:
        """The values that are finite, of the metrics that have any."""
        kept = {
            name: {step: value for step, value in values.items() if value is not None}
            for name, values in self.series.items()
        }
        return {name: values for name, values in kept.items() if values}

    @property
    def problems(self) -> list[str]:
        """A sentence about broken lines, if there are any."""
        if not self.broken:
            return []
        named = ", ".join(map(str, self.broken[:MOST_NAMED])) + (" and more" if len(self.broken) > MOST_NAMED else "")
        lines = "a line" if len(self.broken) == 1 else f"{len(self.broken)} lines"
        return [f"metrics.jsonl has {lines} that cannot be read (line {named}): their values are missing here."]


class MetricsReader:
    """Reads a file again and again while a run writes it, what was added each time. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._lines = 0
        self._end = b""  # the last bytes before that place
        self._series: dict[str, dict[int, float | None]] = {}
        self._broken: list[int] = []
        self._replaced = 0

    def read(self) -> LoggedMetrics:
        """Returns all metrics. A last line without an end is being written, and no broken one.

        Raises:
            OSError: the file cannot be read.
        """
        with self._path.open("rb") as file:
            file.seek(self._place - len(self._end))
            if file.read(len(self._end)) != self._end:  # another file, such as that of a run that was set back
                self._place, self._lines, self._end = 0, 0, b""
                self._series, self._broken = {}, []
                self._replaced += 1
                file.seek(0)
            added = file.read()
        *lines, rest = added.split(b"\n")
        for line in lines:
            self._lines += 1
            row = _row(line)
            if row is not None:
                _add(self._series, row)
            elif line:
                self._broken.append(self._lines)
        whole = added[: len(added) - len(rest)]
        self._place += len(whole)
        self._end = (self._end + whole)[-REMEMBERED:]
        series = {name: dict(values) for name, values in self._series.items()}
        last = _row(rest)
        if last is not None:
            _add(series, last)
        return LoggedMetrics(
            series={name: _by_step(values) for name, values in series.items()},
            broken=tuple(self._broken),
            replaced=self._replaced,
        )


def read_logged(path: Path) -> LoggedMetrics:
    """Returns all metrics of a file. A last line without an end is being written, and no broken one.

    Raises:
        OSError: it cannot be read.
    """
    return MetricsReader(path).read()


def thinned(steps: list[int], values: list[float | None], points: int) -> dict[str, list[Any]]:
    """Returns `points` points of a curve (0: all), evenly taken, its ends included, and besides its least and its
    greatest value."""
    places: Sequence[int] = range(len(steps))
    if points and len(steps) > points:
        last = max(1, points - 1)
        known = {place: value for place, value in enumerate(values) if value is not None}
        extremes = {min(known, key=known.__getitem__), max(known, key=known.__getitem__)} if known else set()
        places = sorted(extremes | {place * (len(steps) - 1) // last for place in range(points)})
    return {"steps": [steps[place] for place in places], "values": [values[place] for place in places]}


def read_metrics(path: Path) -> dict[str, Series]:
    """Returns every metric's values by step; null values, and lines broken by a crash or a full disk, are left out.

    Raises:
        OSError: the file cannot be read.
    """
    return read_logged(path).known


def _row(line: bytes) -> tuple[int, dict[str, float | None]] | None:
    """Returns a line's step and values; None if it cannot be read."""
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
        return step, {name: _number(value) for name, value in row.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _add(series: dict[str, dict[int, float | None]], row: tuple[int, Mapping[str, float | None]]) -> None:
    step, values = row
    for name, value in values.items():
        series.setdefault(name, {})[step] = value


def _by_step(values: dict[int, float | None]) -> dict[int, float | None]:
    steps = list(values)
    return values if all(map(lt, steps, steps[1:])) else dict(sorted(values.items()))


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type] # what is no number raises
    return number if math.isfinite(number) else None
