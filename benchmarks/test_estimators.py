"""Estimators on 1,024 ragged sequences of up to 4,096 action tokens, and the scan against the usual loop over time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.domain.algorithms.estimators import ESTIMATORS, EstimatorInput, EstimatorParams
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum

SEQUENCES, LONGEST, SAMPLES, DISCOUNT = 1024, 4096, 8, 0.95
SMOKE_SEQUENCES, SMOKE_LONGEST = 16, 32


@pytest.fixture
def lengths_S(smoke: bool) -> Tensor:
    sequences, longest = (SMOKE_SEQUENCES, SMOKE_LONGEST) if smoke else (SEQUENCES, LONGEST)
    return torch.randint(1, longest + 1, (sequences,))


def measure(benchmark: Any, work: Any, tokens: int) -> None:
    benchmark.pedantic(work, rounds=3, warmup_rounds=1)
    benchmark.extra_info["tokens"] = tokens
    benchmark.extra_info["tokens_per_s"] = round(tokens / benchmark.stats.stats.min)


@pytest.mark.benchmark(group="estimators")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(benchmark: Any, lengths_S: Tensor, name: str) -> None:
    total = int(lengths_S.sum())
    inputs = EstimatorInput(
        rewards_N=torch.rand(total),  # maxrl refuses negative ones
        token_rewards_N=torch.randn(total),
        values_N=torch.randn(total),
        action_mask_N=torch.ones(total, dtype=torch.bool),
        lengths_S=lengths_S,
        group_ids_S=torch.arange(len(lengths_S)) // SAMPLES,
        sample_ids_S=torch.arange(len(lengths_S)),
        baselines_S=torch.randn(len(lengths_S)),
        reward_parts_SK=torch.randn(len(lengths_S), 2),
        part_weights_K=torch.ones(2),
        state_ids_N=torch.zeros(total, dtype=torch.int64),
        logprobs_N=-torch.rand(total),
        collision_N=torch.rand(total),
    )
    params = EstimatorParams(gamma=0.99, lambd=DISCOUNT)
    measure(benchmark, lambda: ESTIMATORS[name](inputs, params), total)


@pytest.mark.benchmark(group="discounted sum")
def test_scan(benchmark: Any, lengths_S: Tensor) -> None:
    x_N = torch.randn(int(lengths_S.sum()))
    measure(benchmark, lambda: reverse_discounted_sum(x_N, lengths_S, DISCOUNT), len(x_N))


@pytest.mark.benchmark(group="discounted sum")
def test_loop_over_time(benchmark: Any, lengths_S: Tensor) -> None:
    """Runs on sequences padded to [S, T], one step of the recursion after another."""
    sequences, longest = len(lengths_S), int(lengths_S.max())
    padded_ST = torch.randn(sequences, longest)
    padded_ST[torch.arange(longest) >= lengths_S[:, None]] = 0.0

    def loop() -> Tensor:
        running_S = torch.zeros(sequences)
        columns = []
        for t in reversed(range(longest)):
            running_S = padded_ST[:, t] + DISCOUNT * running_S
            columns.append(running_S)
        return torch.stack(columns[::-1], dim=1)

    measure(benchmark, loop, int(lengths_S.sum()))
