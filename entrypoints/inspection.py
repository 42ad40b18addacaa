"""`rollgrad inspect`: how a run goes or ended, from the files in its directory, also while it runs or after its death.

Importable without torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, fields, frozen

from rollgrad.adapters.checkpoints.names import METRICS_FILE
from rollgrad.adapters.tracking.console import EVAL_MEAN, PASSED
from rollgrad.adapters.tracking.metrics_file import Series, read_metrics
from rollgrad.domain.control.findings import Finding, LearningWatch, finding_lines
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.run_directory import is_run, last_step, no_run
from rollgrad.entrypoints.run_record import read_run

SHOWN = (
    *("reward/mean", PASSED, "eval/loss", "eval/nll", "eval/accuracy", "train/loss", "train/accuracy"),
    *("rollout/entropy", "rollout/response_length_mean", "rollout/truncated_share", "rollout/zero_spread_share"),
    *("policy/ref_kl", "policy/mismatch_kl", "policy/grad_norm", "train/grad_norm"),
    *("time/generate_s", "time/experience_s", "time/update_s", "time/sync_s", "time/step_s"),
)
"""Metrics whose ends are shown, in this order."""


@frozen(kw_only=True)
class Curve:
    """A metric's first, last, least and greatest value, each but the last two with its step."""

    first_step: int
    first: float
    last_step: int
    last: float
    least: float
    greatest: float


@frozen(kw_only=True)
class Inspection:
    """State of a run."""

    run: str
    status: str
    """As `run.json` has it; `unknown` for a run of an earlier version."""
    reason: str | None
    """Reason of the status."""
    steps: int
    """Finished steps."""
    of: int | None
    """Steps of the whole run; None if that is not known."""
    started: str | None
    ended: str | None
    curves: Mapping[str, Curve]
    """By metric."""
    findings: tuple[Finding, ...]

    def as_json(self) -> str:
        """Returns the whole inspection as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def as_markdown(self) -> str:
        """Returns a heading, a table of the curves' ends, and the findings as a list."""
        lines = [f"# {self._headline()}", ""]
        if self.curves:
            lines += ["| metric | first | last | least | greatest |", "|---|---|---|---|---|"]
            lines += [f"| {name} | {' | '.join(_numbers(curve))} |" for name, curve in self.curves.items()]
            lines.append("")
        lines += [f"- {line}" for line in self._findings()]
        return "\n".join(lines) + "\n"

    def as_text(self) -> str:
        """Returns the same for a terminal."""
        lines = [self._headline(), ""]
        if self.curves:
            width = max(len(name) for name in self.curves)
            lines.append(f"{'':{width}}  {'first':>10} {'last':>10} {'least':>10} {'greatest':>10}")
            for name, curve in self.curves.items():
                lines.append(f"{name:{width}}  {' '.join(f'{number:>10}' for number in _numbers(curve))}")
            lines.append("")
        lines += self._findings()
        return "\n".join(lines) + "\n"

    def _headline(self) -> str:
        total = "" if self.of is None else f" of {self.of}"
        why = "" if self.reason is None else f" ({self.reason})"
        return f"{self.run}: {self.status} after {self.steps}{total} steps{why}"

    def _findings(self) -> list[str]:
        return finding_lines(self.findings) or ["no findings"]


def inspect(run: Path, series: Mapping[str, Series] | None = None) -> Inspection:
    """Returns the state of the run in a directory; `series` are its metrics, where they have been read already.

    Raises:
        DataError: there is no run, or its logs cannot be read.
    """
    facts = read_run(run)
    metrics = run / METRICS_FILE
    if not is_run(run):
        raise no_run(run)
    try:
        if series is None:
            series = read_metrics(metrics) if metrics.exists() else {}
        steps = max((step for values in series.values() for step in values), default=0) or last_step(run)
    except OSError as error:
        raise DataError(
            f"{error.filename or run} cannot be read ({error.strerror or error}): name another run."
        ) from error
    known = facts or {}
    return Inspection(
        run=str(run),
        status=known.get("status", "unknown"),
        reason=known.get("reason"),
        steps=steps,
        of=known.get("steps"),
        started=known.get("started"),
        ended=known.get("ended"),
        curves={name: _curve(series[name]) for name in _shown(series) if series.get(name)},
        findings=LearningWatch(learning_settings(known, steps)).after(series).findings(),
    )


def _shown(series: Mapping[str, Series]) -> list[str]:
    """Returns `SHOWN`, with the mean reward of evaluations after the share that passes where the two differ."""
    means = [name for name in series if name.startswith(EVAL_MEAN) and series[name] != series.get(PASSED)]
    return [shown for name in SHOWN for shown in ([name, *means] if name == PASSED else [name])]


def learning_settings(facts: Mapping[str, Any], steps: int) -> LearningSettings:
    """Returns the settings that findings depend on, from `run.json`; the default ones of a run that wrote none, or
    something else."""
    written = facts.get("learning")
    known = {field.name for field in fields(LearningSettings)}
    given = written if isinstance(written, dict) else {}
    numbers: dict[str, Any] = {
        name: value for name, value in given.items() if name in known and isinstance(value, int | float)
    }
    return LearningSettings(**{"steps": steps} | numbers)


def _curve(values: Series) -> Curve:
    steps = sorted(values)
    first, last = steps[0], steps[-1]
    return Curve(
        first_step=first,
        first=values[first],
        last_step=last,
        last=values[last],
        least=min(values.values()),
        greatest=max(values.values()),
    )


def _numbers(curve: Curve) -> list[str]:
    return [f"{value:.4g}" for value in (curve.first, curve.last, curve.least, curve.greatest)]
