"""Metrics on standard error: a progress bar on a terminal, a line every few steps elsewhere."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.progress import ShowsProgress

if TYPE_CHECKING:
    from rich.console import Console

PASSED = "eval/pass@1"
"""Share of an evaluation's replies that pass."""
_SHOWN = {
    "reward/mean": ("reward", ".3f"),
    PASSED: ("eval", ".3f"),
    "train/loss": ("loss", ".4f"),
    "eval/loss": ("held-out loss", ".4f"),
    "eval/accuracy": ("held-out accuracy", ".3f"),
    "eval/step_accuracy": ("held-out step accuracy", ".3f"),
    "policy/approx_kl": ("kl", "z.4f"),
    "rollout/entropy": ("entropy", "z.3f"),
    "rollout/response_length_mean": ("length", ".0f"),
    "time/step_s": ("s/step", ".1f"),
}
"""Metrics that are shown, in this order, each with its name and number format (z: no minus before 0)."""
_EVALUATED = {PASSED, "eval/loss"}
"""Metrics by which an evaluation is known, which is a line of its own in a log file."""
EVAL_MEAN = "eval/mean@"
"""Beginning of the name of an evaluation's mean reward."""
_LINES_PER_RUN = 20
"""Approximate number of lines of a run in a log file."""
_SECONDS_BETWEEN = 10.0
"""Seconds between lines about a step that goes on; a first step that takes less has none."""


class ConsoleSink(MetricSink, ShowsProgress):
    """Shows the main metrics beside step `n/total_steps`: the bar their latest values, a line those of its step or
    evaluation. The bar also shows how far the step is that goes on; lines do so until the first one has ended.
    `console` defaults to standard error; `clock` returns seconds."""

    def __init__(
        self, total_steps: int, console: "Console | None" = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._every = max(1, total_steps // _LINES_PER_RUN)
        self._latest: dict[str, float] = {}
        self._clock = clock
        self._told_at: float | None = clock()  # of the last line; None from the end of the first step on
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the values in `metrics`; the bar also the latest values of other metrics."""
        self._told_at = None if step else self._clock()
        if self._progress is not None:
            self._latest |= metrics
            self._progress.update(self._task, completed=step, description=_summary(self._latest, "[dim]{}[/] {}"))
        elif step % self._every == 0 or step in (1, self._total) or _EVALUATED & metrics.keys():
            line = f"step {step}/{self._total}  {_summary(metrics, '{} {}')}".rstrip()
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def progress(self, doing: str, done: int, of: int) -> None:
        """Shows how far the step is behind the bar, and in the first one in a line now and then."""
        counted = f"{doing} {done}/{of}" if of else doing
        if self._progress is not None:
            shown = _summary(self._latest, "[dim]{}[/] {}")
            self._progress.update(self._task, description=f"{shown}  [dim]{counted}[/]".lstrip())
        elif self._told_at is not None and self._clock() - self._told_at >= _SECONDS_BETWEEN:
            self._told_at = self._clock()
            self._console.print(counted, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Stops the bar; idempotent."""
        if self._progress is not None:
            self._progress.stop()


def _summary(metrics: Mapping[str, float], pattern: str) -> str:
    shown = [(name, format(metrics[key], spec)) for key, (name, spec) in _SHOWN.items() if key in metrics]
    passed = metrics.get(PASSED)
    means = [value for key, value in metrics.items() if key.startswith(EVAL_MEAN) and value != passed]
    if passed is not None and means:  # rewards that are not 0 or 1, of which the share that passes says little
        place = next(place for place, (name, _) in enumerate(shown) if name == _SHOWN[PASSED][0])
        shown.insert(place + 1, ("eval mean", format(means[0], ".3f")))
    return "  ".join(pattern.format(name, value) for name, value in shown)
