"""Metrics of a run as the list of runs has them. Importable without torch."""

import math
from typing import Any

from rollgrad.adapters.tracking.console import EVAL_MEAN, PASSED
from rollgrad.adapters.tracking.metrics_file import LoggedMetrics

SPARKS = 60
"""Points of the small curve in the list of runs."""
SPARK_METRICS = ("reward/mean", "train/loss")
EVALUATED = (PASSED, "eval/accuracy", "eval/loss", "eval/nll")
"""Results of evaluations in the list of runs: the first that was logged, or the mean score where no share of passes
changes, as scores are not 0 or 1."""


def in_short(logged: LoggedMetrics) -> dict[str, Any]:
    """Returns what the list of runs has of a run's metrics."""
    spark = next((name for name in SPARK_METRICS if logged.series.get(name)), None)
    points = [value for value in logged.series.get(spark or "", {}).values() if value is not None]
    kept = points if len(points) <= SPARKS else [points[n * (len(points) - 1) // (SPARKS - 1)] for n in range(SPARKS)]
    times = logged.series.get("time/step_s", {}).values()
    return {
        "seconds": math.fsum(value for value in times if value is not None) or None,
        "step": logged.last_step,
        "rewards": kept,
        "spark": spark,
        "eval": _best(logged),
        "problems": logged.problems,
    }


def _best(logged: LoggedMetrics) -> dict[str, Any] | None:
    passes = set(logged.series.get(PASSED, {}).values())
    means = [name for name in logged.series if name.startswith(EVAL_MEAN)]
    graded = [name for name in means if len(passes) == 1 and set(logged.series[name].values()) != passes]
    for name in (*graded, *EVALUATED):
        values = {step: value for step, value in logged.series.get(name, {}).items() if value is not None}
        if values:
            least = name in ("eval/loss", "eval/nll")
            step = min(values, key=lambda step: values[step] if least else -values[step])
            return {"metric": name, "best": values[step], "best_step": step, "last": list(values.values())[-1]}
    return None
