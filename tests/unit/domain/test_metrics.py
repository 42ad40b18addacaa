"""Metrics: however a step is divided, and whoever has its parts, they combine to those of the whole."""

import math
import pickle
import statistics
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.batches.metrics import (
    CalibrationError,
    Common,
    Count,
    Maximum,
    Mean,
    Spread,
    Total,
    joined,
    over_steps,
)

NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)
SEQUENCES = st.lists(st.tuples(NUMBERS, st.floats(0, 4, width=32)), min_size=1, max_size=12)


def report(sequences: list[tuple[float, float]]) -> Mapping[str, Tensor | float]:
    """One metric of each kind, from (value, weight) of each sequence."""
    values = torch.tensor([value for value, _ in sequences], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in sequences], dtype=torch.float64)
    return {
        "plain": (values * weights).sum(),
        "total": Total(values.sum()),
        "mean": Mean((values * weights).sum(), weights.sum()),
        "maximum": Maximum(values.max()),
        "common": Common(7.0),
        "count": Count(1.0),
        "calibration": CalibrationError.of_choices(values / 50, weights),
        "spread": Spread.of(values),
    }


@given(SEQUENCES, st.data())
def test_any_division_gives_the_metrics_of_the_whole(sequences: list[tuple[float, float]], data: st.DataObject) -> None:
    """Micro-batches are joined in each process, and then the processes."""
    cuts = data.draw(st.lists(st.integers(0, len(sequences)), max_size=4).map(sorted))
    parts = [sequences[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequences)], strict=True) if a < b]
    cut = data.draw(st.integers(0, len(parts)))
    processes = [joined([report(part) for part in own]) for own in (parts[:cut], parts[cut:]) if own]
    sent = [pickle.loads(pickle.dumps(process)) for process in processes]
    assert joined(sent) == pytest.approx(joined([report(sequences)]), rel=1e-6, abs=1e-4)


def test_a_mean_over_pairs_weighs_processes_by_their_pairs() -> None:
    """A process without pairs of its own computes a copy, which has no weight."""
    whole = joined([{"accuracy": Mean(3.0, 3)}, {"accuracy": Mean(0.0, 1)}, {"accuracy": Mean(0.0, 0)}])
    assert whole["accuracy"] == 0.75


def test_a_calibration_error_is_the_distance_of_confidence_and_share_of_right_choices() -> None:
    """Guo et al. 2017, eq. 3, bin by bin, from hand-written probabilities; what weighs nothing does not count."""
    sure = [0.72, 0.74, 0.98, 0.51, 0.5]
    right = [1.0, 0.0, 1.0, 1.0, 0.5]  # of a tie, half
    logits = [math.log(p / (1 - p)) * (1 if correct >= 0.5 else -1) for p, correct in zip(sure, right, strict=True)]
    found = CalibrationError.of_choices(torch.tensor([*logits, -9.0]), torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 0.0]))
    bins = [abs(0.72 + 0.74 - 1), 2 * abs(0.98 - 1), abs(0.51 + 0.5 - 1.5)]
    assert found == pytest.approx(sum(bins) / 6, abs=1e-6)
    assert CalibrationError.of_choices(torch.tensor([]), torch.tensor([])) == 0.0
    broken = CalibrationError.of_choices(torch.tensor([math.nan, 1.0]), torch.tensor([0.5, 0.5]))
    assert math.isnan(broken)  # the update is then refused for its loss, as of other trainers


def test_steps_of_an_update() -> None:
    steps: list[dict[str, float]] = [
        {"plain": 1.0, "loss": Total(4.0), "pairs": Mean(1.0, 1), "top": Maximum(3.0), "skipped": Count(0.0)},
        {"plain": 2.0, "loss": Total(2.0), "pairs": Mean(0.0, 3), "top": Maximum(9.0), "skipped": Count(1.0)},
    ]
    steps[0]["norm"] = Common(6.0)
    assert over_steps(steps) == {"plain": 1.5, "loss": 3.0, "pairs": 0.25, "top": 9.0, "skipped": 1.0, "norm": 6.0}
    assert all(type(value) is float for value in over_steps(steps).values())


@given(st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=4))
def test_a_spread_is_the_deviation_of_all_numbers(parts: list[list[float]]) -> None:
    """Those of other processes and of other steps, too, of which one may have none."""
    steps = [{"a": Spread.of(torch.tensor(part))} for part in parts]
    everything = [number for part in parts for number in part]
    deviation = statistics.stdev(everything) if len(everything) > 1 else 0.0
    assert joined(steps)["a"] == pytest.approx(deviation, rel=1e-6, abs=1e-6)
    assert over_steps(steps)["a"] == pytest.approx(deviation, rel=1e-6, abs=1e-6)


def test_what_is_not_a_number_stays_so() -> None:
    assert math.isnan(joined([{"a": math.nan}, {"a": 1.0}])["a"])
    for both in ([{"a": Maximum(a)}, {"a": Maximum(b)}] for a, b in ((math.nan, 1), (1, math.nan))):
        assert math.isnan(joined(both)["a"])
        assert math.isnan(over_steps(both)["a"])
    assert math.isnan(joined([{"a": Mean(math.nan, 1)}, {"a": Mean(1.0, 1)}])["a"])
