"""The evaluation with the best value of a metric so far, whose model a run keeps. Pure: it knows no model."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import evolve, field, frozen

from rollgrad.domain.errors import ConfigurationError

LOWER_IS_BETTER = ("loss", "nll", "divergence", "kl", "failed", "truncated_share", "calibration_error", "bits_per_byte")
"""Ends of the names of metrics whose lowest value is the best; of all others it is the highest."""


DATASET, ROWS = "dataset", "rows"
"""Names, in what is measured, of where the rows of evaluations are, and of the hash of all of them."""


def measured_alike(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether evaluations by two settings can be compared. Rows go by what they hold, wherever they are; where
    that is not known of both, by their place.

    >>> measured_alike({"dataset": "a", "rows": "1"}, {"dataset": "b", "rows": "1"})
    True
    >>> measured_alike({"dataset": "a", "rows": "1"}, {"dataset": "a", "rows": "2"})
    False
    >>> measured_alike({"dataset": "a"}, {"dataset": "a", "rows": "2"})
    True
    """
    ignored = DATASET if ROWS in before and ROWS in now else ROWS
    first, second = ({name: value for name, value in each.items() if name != ignored} for each in (before, now))
    return first == second


class Best(StrEnum):
    """Value of a metric that is the best."""

    AUTO = "auto"
    """The one that the metric's name says."""
    HIGHEST = "highest"
    LOWEST = "lowest"


@frozen
class BestModel:
    """The best value of a metric so far, and the evaluation that it is from."""

    metric: str | None = None
    """None: there is no best model."""
    step: int = 0
    """Step of the best value."""
    value: float | None = None
    """The best value; None before the first."""
    known: bool = False
    """Whether an evaluation had the metric."""
    best: Best = Best.AUTO
    """Which value is the best."""
    waited: int = 0
    """Evaluations with the metric since then, none of which was better."""
    metrics: Mapping[str, float] = field(factory=dict)
    """All metrics of that evaluation."""
    measured: Mapping[str, Any] = field(factory=dict)
    """Settings of the evaluations: values under other settings cannot be compared."""
    left: Mapping[str, Any] = field(factory=dict)
    """State of the best model by another measure that the run had before, while none replaces it."""

    @property
    def sought(self) -> Best:
        """Whether the highest or the lowest value is the best."""
        if self.best is not Best.AUTO:
            return self.best
        return Best.LOWEST if self.metric is not None and self.metric.endswith(LOWER_IS_BETTER) else Best.HIGHEST

    def exhausted(self, patience: int | None) -> str | None:
        """Says that as many evaluations as `patience` were no better than the best one; None before, and without."""
        if patience is None or self.waited < patience:
            return None
        times = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        if self.value is None:
            return f"{self.metric} was no number in {times}"
        return f"{self.metric} was no better in {times} than the {self.value:.4g} after step {self.step}"

    def continued(self, state: Mapping[str, Any]) -> "BestModel":
        """Returns the best one that a run had before (`state_dict`). By another metric, or the same one where another
        value was the best or another evaluation gave it, it is `left`."""
        alike = state.get("metric") == self.metric and state.get("sought", self.sought) == self.sought
        alike = alike and measured_alike(state.get("measured", self.measured), self.measured)  # earlier do not say
        if self.metric is None or not alike:
            return evolve(self, left=state if state.get("value") is not None else {})
        waited, metrics = int(state.get("waited", 0)), dict(state.get("metrics", {}))  # earlier states have none
        return evolve(self, step=int(state["step"]), value=state["value"], known=True, waited=waited, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run needs to go on, JSON-serialisable; without a metric, what a run before it needed."""
        if self.metric is None:
            return dict(self.left)
        found = {"step": self.step, "value": self.value, "waited": self.waited, "metrics": dict(self.metrics)}
        return {"metric": self.metric, "sought": str(self.sought), "measured": dict(self.measured), **found}

    def after(self, step: int, metrics: Mapping[str, float]) -> "BestModel":
        """Returns the best one after the evaluation of `step`. The model that training begins with is not compared,
        nor one whose evaluation lacks the metric: `eval/mean@4` is not there where of each four samples one failed.

        Raises:
            ConfigurationError: neither this evaluation nor one before it has such a metric.
        """
        if self.metric is None or (self.known and self.metric not in metrics):
            return self
        if self.metric not in metrics:
            raise ConfigurationError(
                f"ckpt.best_metric is {self.metric}, but evaluations give {', '.join(sorted(metrics))}: set "
                "--ckpt.best_metric to one of them."
            )
        value = float(metrics[self.metric])
        if not step:
            return evolve(self, known=True)
        sign = -1 if self.sought is Best.LOWEST else 1
        better = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        if better:
            return evolve(self, step=step, value=value, known=True, waited=0, metrics=dict(metrics))
        return evolve(self, known=True, waited=self.waited + 1)
