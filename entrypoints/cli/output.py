"""Output of commands: results on stdout, and tables of metrics."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollgrad.adapters.system.printing import printing_to_stderr

if TYPE_CHECKING:
    from rich.table import Table

    from rollgrad.entrypoints.library import TrainResult

UNLIMITED = 100_000
"""Columns of a file, which has no width: what reads it may look for whole names."""

BORDER = 3
"""Columns that a table's line and blanks take beside each of its own."""

FOLDED_NAME = 16
"""Columns that a longer name of a model is folded to, if there is no more room."""

ERROR, DIFFERENCE = "_stderr", "_difference"
"""Ends of names of metrics: of a standard error, and of what is compared with the first model."""

OF_REPLIES = re.compile(r"(?<=/mean)@\d+$")
"""Part of the name of the mean score that the name of its standard error lacks."""

CLEAR, CLEAR_ERRORS = " *", 2
"""Mark of a difference that is at least so many standard errors."""


@contextlib.contextmanager
def results_only_on_stdout() -> Iterator[None]:
    """Sends to stderr what libraries (DeepSpeed, on import), reward functions, and processes of both print."""
    with printing_to_stderr(), contextlib.redirect_stdout(sys.stderr):
        yield


def show_result(output_dir: str, result: "TrainResult", *, console: bool) -> None:
    """Prints the report's path, or the run's directory, and says on stderr how the run ended; with `console` the
    evaluations before and after it, too."""
    columns = {name: metrics for name, metrics in (("before", result.before), ("after", result.after)) if metrics}
    if columns and console:
        show_metrics("Evaluation", columns)
    named = Path(output_dir)  # as the settings have it: the result's is absolute
    if result.interrupted:
        steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
        sys.stderr.write(f"interrupted after {steps}; what was trained is in {named}\n")
    sys.stdout.write(f"{named / result.report.name if result.report else named}\n")
    sys.stdout.flush()
    sys.stderr.writelines(f"warning: {finding}\n" for finding in result.findings)


def show_metrics(title: str, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Prints a table of metrics, whose `columns` are by name, below its title. A standard error is beside what it is
    of, as in `0.25 ± 0.061`. Columns for which a terminal is too narrow are in further tables."""
    from rich.console import Console

    shown = {name: dict(_shown(metrics)) for name, metrics in columns.items()}
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = UNLIMITED
    console.print(title, soft_wrap=True)  # rich folds a table's own title, to the width of the table
    longest = max((len(metric) for texts in shown.values() for metric in texts), default=0)
    for names in _side_by_side(shown, console.width - longest - BORDER - 1):
        console.print(_table({name: shown[name] for name in names}, console.width))
    if any(text.endswith(CLEAR) for texts in shown.values() for text in texts.values()):
        console.print(f"{CLEAR.strip()} a difference of two standard errors or more, which is seldom chance")


def _shown(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of metrics; that of a standard error is part of its metric's."""
    errors = {name: OF_REPLIES.sub("", name) + ERROR for name in metrics}
    for name, value in metrics.items():
        if name in errors.values():
            continue
        difference = name.endswith(DIFFERENCE)
        text = f"{value:{'+' if difference else ''}.4g}"
        error = metrics.get(errors[name])
        if error is not None:
            text += f" ± {error:.2g}"
            text += CLEAR if difference and value and abs(value) >= CLEAR_ERRORS * error else ""
        yield name, text


def _side_by_side(columns: Mapping[str, Mapping[str, str]], width: int) -> Iterator[list[str]]:
    """Yields the names of columns that fit into a width, at least one at a time."""
    names: list[str] = []
    taken = 0
    for name, texts in columns.items():
        taken += _least_width(name, texts) + BORDER
        if names and taken > width:
            yield names
            names, taken = [], _least_width(name, texts) + BORDER
        names.append(name)
    if names:
        yield names


def _least_width(name: str, texts: Mapping[str, str]) -> int:
    """Returns how wide a column must be, whose texts stay whole, while its name may be folded."""
    return max(min(len(name), FOLDED_NAME), *map(len, texts.values()), 1)


def _table(columns: Mapping[str, Mapping[str, str]], width: int) -> "Table":
    """Returns a table, in which names of metrics are folded if nothing else makes room for them in a width."""
    from rich.table import Column, Table

    metrics = list(dict.fromkeys(metric for texts in columns.values() for metric in texts))
    widths = {name: _least_width(name, texts) for name, texts in columns.items()}
    room = width - sum(widths.values()) - BORDER * (len(widths) + 1) - 1
    first = min(max(map(len, metrics), default=1), max(room, 1))
    spare = max(room - first, 0) // len(widths)
    heads = (Column(name, overflow="fold", width=max(w, min(len(name), w + spare))) for name, w in widths.items())
    table = Table(Column("metric", overflow="fold", width=first), *heads)
    for metric in metrics:
        table.add_row(metric, *(texts.get(metric, "") for texts in columns.values()))
    return table
