"""Estimators on 1,024 ragged sequences of up to 4,096 action tokens, and the scan against the usual loop over time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.domain.estimators import ESTIMATORS, EstimatorInput, EstimatorParams
from rollgrad.domain.estimators.scan import reverse_discounted_sum

SEQUENCES, LONGEST, SAMPLES = 1024, 4096, 8


def lengths() -> Tensor:
    return torch.randint(1, LONGEST + 1, (SEQUENCES,))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(benchmark: Any, name: str) -> None:
    lengths_S = lengths()
    total = int(lengths_S.sum())
    inputs = EstimatorInput(
        rewards_N=torch.randn(total),
        token_rewards_N=torch.randn(total),
        values_N=torch.randn(total),
        action_mask_N=torch.ones(total, dtype=torch.bool),
        lengths_S=lengths_S,
        group_ids_S=torch.arange(SEQUENCES) // SAMPLES,
        sample_ids_S=torch.arange(SEQUENCES),
    )
    params = EstimatorParams(gamma=0.99, lambd=0.95)
    benchmark.extra_info["tokens"] = total
    benchmark.pedantic(lambda: ESTIMATORS[name](inputs, params), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="discounted sum")
def test_scan(benchmark: Any) -> None:
    lengths_S = lengths()
    x_N = torch.randn(int(lengths_S.sum()))
    benchmark.pedantic(lambda: reverse_discounted_sum(x_N, lengths_S, 0.95), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="discounted sum")
def test_loop_over_time(benchmark: Any) -> None:
    padded_ST = torch.randn(SEQUENCES, LONGEST)

    def loop() -> Tensor:
        running_S = torch.zeros(SEQUENCES)
        columns = []
        for t in reversed(range(LONGEST)):
            running_S = padded_ST[:, t] + 0.95 * running_S
            columns.append(running_S)
        return torch.stack(columns[::-1], dim=1)

    benchmark.pedantic(loop, rounds=3, warmup_rounds=1)
