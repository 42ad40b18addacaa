"""Output of commands: results on stdout, and tables of metrics."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollgrad.adapters.system.printing import printing_to_stderr

if TYPE_CHECKING:
    from rollgrad.entrypoints.library import TrainResult


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
        sys.stderr.write(f"interrupted after {result.steps} steps; what was trained is in {named}\n")
    sys.stdout.write(f"{named / result.report.name if result.report else named}\n")
    sys.stdout.flush()
    sys.stderr.writelines(f"warning: {finding}\n" for finding in result.findings)


def show_metrics(title: str, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Prints a table of metrics, whose `columns` are by name, below its title."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in ("metric", *columns)))
    for name in dict.fromkeys(name for metrics in columns.values() for name in metrics):
        table.add_row(name, *(f"{metrics[name]:.4g}" if name in metrics else "" for metrics in columns.values()))
    console = Console(highlight=False, markup=False)
    console.print(title, soft_wrap=True)  # rich folds a table's own title, to the width of the table
    console.print(table)
