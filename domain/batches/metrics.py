"""Metrics of optimizer steps. Each knows how it is combined: over micro-batches and processes, which have parts of a
step, and over the steps of an update.

A plain number is the sum of weight x value over tokens, with the loss weights of the step, as the loss is. Parts add
up, and the code that knows the sum of the step's weights divides by it. Everything else is a `Metric`. Metrics are
numbers: they can be compared, added and logged like any float.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor


class Metric(float):
    """A number with its own way of being combined."""

    def joined(self, other: Self) -> Self:
        """Returns the metric of two parts of a step together."""
        raise NotImplementedError

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the metric of an update of `steps` steps, from the `values` of the steps that reported one."""
        return reduce(float.__add__, map(float, values)) / steps


class Total(Metric):
    """A sum over the step that is no mean, such as a term of the loss. Over steps it is their mean."""

    def joined(self, other: Self) -> Self:
        """Returns the sum."""
        return type(self)(float(self) + float(other))


class Maximum(Metric):
    """A largest value."""

    def joined(self, other: Self) -> Self:
        """Returns the larger one, or NaN if one is NaN."""
        return self if self >= other or self != self else other

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the largest one, or NaN if one is NaN."""
        return float(reduce(Maximum.joined, values))


class Mean(Metric):
    """A mean with weights of its own, such as one over sequences or pairs: `total` is the sum of weight x value,
    `weight` that of the weights. What weighs nothing in the loss must weigh nothing here: a process without samples of
    its own computes a copy of one, with weights of 0."""

    total: float
    weight: float

    def __new__(cls, total: Tensor | float, weight: Tensor | float) -> Self:
        """Makes the mean; one without any weight is 0."""
        mean = super().__new__(cls, float(total) / float(weight) if float(weight) else 0.0)
        mean.total, mean.weight = float(total), float(weight)
        return mean

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        """Returns what copies are made from: metrics are sent between processes."""
        return self.total, self.weight

    def joined(self, other: Self) -> Self:
        """Returns the mean over both."""
        return type(self)(self.total + other.total, self.weight + other.weight)

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the mean over everything that had weight in any step."""
        return float(reduce(Mean.joined, values))


class CalibrationError(Metric):
    """The expected calibration error of predictions (Guo et al. 2017, arXiv:1706.04599, eq. 3): the mean distance
    between how sure they were and how often they were right, over `BINS` equal bins of the first. `bins` has the sums
    of weight, weight x confidence and weight x rightness of each."""

    BINS = 10
    bins: tuple[tuple[float, ...], ...]

    def __new__(cls, bins: Sequence[Sequence[float]]) -> Self:
        """Makes the error from the sums of each bin."""
        total = math.fsum(weight for weight, _, _ in bins)
        error = super().__new__(cls, math.fsum(abs(sure - right) for _, sure, right in bins) / total if total else 0.0)
        error.bins = tuple(map(tuple, bins))
        return error

    @classmethod
    def of_choices(cls, logits_P: Tensor, weights_P: Tensor) -> Self:
        """Returns the error of choices between two, one of which is right. `logits_P` says by how much the right one
        is preferred: where it is negative, the other one is chosen. The bins divide the confidences, from 0.5 to 1."""
        sure_P = logits_P.detach().double().abs().sigmoid()
        right_P = (logits_P.detach().double().sign() + 1) / 2
        # What is no number has no bin, and no error but its own: the loss is none either, and is reported.
        bins_P = ((sure_P - 0.5) * 2 * cls.BINS).nan_to_num(0.0).long().clamp(max=cls.BINS - 1)
        columns_P3 = (
            torch.stack([torch.ones_like(sure_P), sure_P, right_P], dim=1) * weights_P.detach().double()[:, None]
        )
        zeros_B3 = torch.zeros(cls.BINS, 3, dtype=torch.float64, device=sure_P.device)
        return cls(zeros_B3.index_add_(0, bins_P, columns_P3).tolist())

    def __getnewargs__(self) -> tuple[tuple[tuple[float, ...], ...]]:  # type: ignore[override]
        """Returns what copies are made from."""
        return (self.bins,)

    def joined(self, other: Self) -> Self:
        """Returns the error of the predictions of both."""
        pairs = zip(self.bins, other.bins, strict=True)
        return type(self)([[one + another for one, another in zip(*pair, strict=True)] for pair in pairs])

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the error of the predictions of all steps."""
        return float(reduce(CalibrationError.joined, values))


class Spread(Metric):
    """The standard deviation of numbers (unbiased: their squares over their count minus 1), of which there are `count`
    with this `mean` and this sum of `squares` around it; 0 for fewer than two."""

    count: int
    mean: float
    squares: float

    def __new__(cls, count: int, mean: float, squares: float) -> Self:
        """Makes the deviation of `count` numbers."""
        spread = super().__new__(cls, math.sqrt(squares / (count - 1)) if count > 1 else 0.0)
        spread.count, spread.mean, spread.squares = count, mean, squares
        return spread

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Returns the deviation of some numbers."""
        numbers = values.detach().double()
        mean = float(numbers.mean()) if len(numbers) else 0.0
        return cls(len(numbers), mean, float((numbers - mean).square().sum()))

    def __getnewargs__(self) -> tuple[int, float, float]:  # type: ignore[override]
        """Returns what copies are made from."""
        return self.count, self.mean, self.squares

    def joined(self, other: Self) -> Self:
        """Returns the deviation of the numbers of both (Chan et al. 1979, eq. 2.1)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        return type(self)(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
        )

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the deviation of the numbers of all steps."""
        return float(reduce(Spread.joined, values))


class Common(Metric):
    """A metric that is equal in all parts of a step, such as the norm of its gradient. Over steps it is the mean of
    those that have it: a skipped step has no norm."""

    def joined(self, other: Self) -> Self:
        """Returns either."""
        return other

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the mean over the steps that reported one."""
        return Metric.over_steps(values, len(values))


class Count(Common):
    """A number of events that every part of a step has alike, such as skipped steps."""

    @staticmethod
    def over_steps(values: Sequence[Any], steps: int) -> float:
        """Returns the sum."""
        return Metric.over_steps(values, 1)


def joined(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Returns the metrics of a step from those of its parts (micro-batches or processes)."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            before = whole.get(name)
            if isinstance(value, Metric):
                whole[name] = value if before is None else value.joined(before)  # type: ignore[arg-type]
            else:
                whole[name] = (before or 0.0) + float(value)
    return whole


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of an update from those of its optimizer steps: means, if they do not say otherwise; a step
    that does not report a plain number or a total counts as 0."""
    reported: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            reported.setdefault(name, []).append(value)
    return {name: _kind(values[0]).over_steps(values, len(steps)) for name, values in reported.items()}


def _kind(value: float) -> type[Metric]:
    return type(value) if isinstance(value, Metric) else Metric
