"""Whole runs in their course: each sick one is named by its own rule alone, and no healthy one by any."""

import random
from collections.abc import Callable

import pytest

from tests.unit.domain.test_findings import HEALTHY, watch

Course = dict[str, Callable[[float], float]]
"""Metrics while the run goes from 0 to 1, where they are not those of every healthy run."""


def always(value: float) -> Callable[[float], float]:
    return lambda done: value


def between(start: float, end: float) -> Callable[[float], float]:
    """A metric that goes evenly from `start` to `end`."""
    return lambda done: start + (end - start) * done


SICK: dict[str, Course] = {
    "constant_reward": {"reward/min": always(0), "reward/max": always(0), "reward/mean": always(0)},
    "no_spread": {"rollout/zero_spread_share": always(1), "advantage/abs_mean": always(0)},
    "truncated": {"rollout/truncated_share": lambda done: min(1.0, 0.6 + done), "reward/mean": between(0.4, 0.1)},
    "no_gradient": {"policy/grad_norm": always(0)},
    "reference_left": {"policy/ref_kl": between(0, 4)},
    "kl_outweighs": {"policy/ref_kl": between(0.02, 0.1), "policy/kl_coef": always(10.0)},
    "entropy_collapsed": {
        "rollout/entropy": lambda done: 1.2 * (1 - done) ** 6,
        "rollout/duplicate_share": lambda done: done**9,
    },
    "reward_follows_length": {
        "rollout/response_length_mean": between(120, 600),
        "rollout/reward_length_correlation": between(0.5, 1),
        "reward/mean": between(0.2, 0.9),
    },
    "mismatch_grows": {"policy/mismatch_kl": between(0.001, 0.3)},
    "stale": {"rollout/rejected_stale": between(0, 6)},
    "failing": {"rollout/failed_environment": between(0, 12)},
    "duplicates": {"rollout/duplicate_share": between(0.4, 1), "rollout/entropy": between(0.4, 0.1)},
    "clipped": {"policy/clip_high_share": between(0.05, 0.6)},
    "part_falls": {
        "reward/part/right": between(0.3, 0.0),
        "reward/part/format": between(0.1, 0.9),
        "reward/mean": between(0.4, 0.9),
    },
    "memory_full": {"memory/host_share": between(0.5, 1.0)},
    "time_lost": {"time/sync_s": between(1, 12)},
}
HEALTHY_RUNS: dict[str, Course] = {
    "has more turns of one token where it is right": {
        "rollout/response_length_mean": between(1, 2.2),
        "rollout/reward_length_correlation": always(0.99),
        "reward/mean": between(0.1, 0.7),
    },
    "steady": {},
    "learns": {"reward/mean": between(0.1, 0.9), "rollout/entropy": between(1.5, 0.2)},
    "solves its prompts": {
        "rollout/all_passed_share": between(0.1, 0.95),
        "rollout/zero_spread_share": between(0.2, 0.94),
        "rollout/duplicate_share": between(0.1, 0.97),
        "advantage/abs_mean": between(0.5, 0.05),
    },
    "reasons longer": {
        "rollout/response_length_mean": between(200, 900),
        "rollout/reward_length_correlation": between(-0.4, 0.4),
    },
    "is rewarded for short replies": {
        "rollout/response_length_mean": between(200, 90),
        "rollout/reward_length_correlation": between(0.0, -0.95),
    },
    "judges by length from the beginning": {"rollout/reward_length_correlation": always(0.95)},
    "overlaps": {"policy/mismatch_kl": between(0.0002, 0.006), "rollout/rejected_stale": between(0, 1)},
    "overlaps after two fresh steps": {
        "staleness/mean": lambda done: 2.0 * (done > 0.05),
        "policy/mismatch_kl": lambda done: 0.0005 + 0.02 * (done > 0.05),
        "rollout/response_length_mean": lambda done: 20.0 + 40 * (done > 0.05),
        "rollout/reward_length_correlation": always(0.9),
    },
    "overlaps while it warms up": {
        "staleness/mean": lambda done: 1.0 * (done > 0.03),
        "policy/lr": lambda done: 1e-5 * min(1.0, 0.02 + 2 * done),
        "policy/mismatch_kl": lambda done: 0.0005 + 0.04 * min(1.0, 2 * done) ** 2,
    },
    "takes several steps": {"policy/clip_low_share": between(0.02, 0.1), "policy/clip_high_share": between(0.02, 0.15)},
    "asks a flaky service": {"rollout/failed_reward": lambda done: 2.0 * (int(done * 100) % 10 < 3)},
    "is cut now and then": {"rollout/truncated_share": between(0.94, 0.3)},
    "trades a little of one part for much of another": {
        "reward/part/right": between(0.3, 0.25),
        "reward/part/format": between(0.1, 0.6),
        "reward/mean": between(0.4, 0.85),
    },
    "uses its machine well": {"memory/host_share": always(0.9), "time/trainer_idle_share": between(0.3, 0.7)},
    "leaves its reference a little": {"policy/ref_kl": between(0, 0.5)},
    "is held near its reference": {"policy/ref_kl": between(0, 0.5), "policy/kl_coef": always(0.2)},
    "has learned as much as its KL allows": {
        "reward/mean": lambda done: min(0.8, 0.3 + 3 * done),
        "policy/ref_kl": lambda done: min(0.5, 2 * done),
        "policy/kl_coef": always(1.0),
        "advantage/abs_mean": lambda done: 0.6 * (1 - done),
    },
    "sharpens": {"rollout/entropy": between(0.8, 0.03), "rollout/duplicate_share": between(0.2, 0.7)},
}


def run_of(course: Course, seed: int, steps: int = 40) -> list[dict[str, float]]:
    """The metrics of a run in that course; all others are off by chance by up to a twentieth."""
    chance = random.Random(seed)
    run = []
    for step in range(steps):
        others = {name: value * chance.uniform(0.95, 1.05) for name, value in HEALTHY.items()}
        run.append(others | {name: metric(step / (steps - 1)) for name, metric in course.items()})
    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_named_by_its_rule_alone(name: str, seed: int) -> None:
    state, _ = watch(*run_of(SICK[name], seed))
    assert {finding.name for finding in state.findings()} == {name}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_a_healthy_run_is_named_by_none(name: str, seed: int) -> None:
    state, _ = watch(*run_of(HEALTHY_RUNS[name], seed))
    assert state.findings() == ()
