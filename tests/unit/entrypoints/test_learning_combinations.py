"""From trajectories to changed weights, with the objects that a run makes of its settings: any estimator with any loss,
aggregation, correction and choice of tokens.

How a step is divided over passes and processes, in which order its rollouts come, and whether those without a gradient
are left out, changes nothing; and what carries no signal moves nothing.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory
from rollgrad.entrypoints.composition.rl.algorithm import (
    advantage_is_all,
    always_scores,
    make_aggregation,
    make_learned_tokens,
    make_objective,
    make_token_filter,
    make_token_selection,
)
from rollgrad.entrypoints.config_io import structure_config
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeReference, FakeValue

EXAMPLES = int(os.environ.get("ROLLGRAD_EXAMPLES", "4"))
"""Combinations for each estimator; ROLLGRAD_EXAMPLES=100 before pytest is the long form."""
TOKENS = range(1, 40)
LOGITS = torch.linspace(-1, 1, VOCABULARY)
LEVELS = ("off", "token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
GATES = ("ratio", "binary_kl", "tv", "opsm", "second_moment")
PARTS = {"right": 1.0, "short": 0.5}
BASELINES = {0: 0.5, 1: 0.0, 2: 1.0}

combination = {
    "seed": st.integers(0, 10**6),
    "loss": st.sampled_from(list(POLICY_LOSSES)),
    "aggregation": st.sampled_from(list(Aggregation)),
    "level": st.sampled_from(LEVELS),
    "mode": st.sampled_from(MODES),
    "gate": st.sampled_from(GATES),
    "old": st.sampled_from(["recompute", "rollout", "interpolate"]),
    "forks": st.sampled_from([1.0, 0.4]),
    "cut": st.booleans(),
}


def config_of(estimator: str, *, kl_coef: float = 0.0, **chosen: Any) -> RLConfig:
    """The settings of a run, which need not be ones that a run would be allowed to have."""
    second_moment = chosen["gate"] == "second_moment"
    return structure_config(
        {
            "actor": {
                "model_name_or_path": "m",
                "policy_loss_type": chosen["loss"],
                "loss_aggregation": chosen["aggregation"],
                "cov_share": 0.2,
                "cov_range": [0.0, 5.0],
            },
            "algo": {
                "advantage": {"estimator": estimator, "gamma": 0.9, "pass_k": 2},
                "correction": {
                    "level": "token" if second_moment and chosen["level"] != "off" else chosen["level"],
                    "mode": chosen["mode"],
                    "gate": chosen["gate"],
                    "threshold": 0.1,
                },
                "kl": {"init_coef": kl_coef},
                # Whole steps are judged by the policy's own log-probs before them.
                "old_logprobs": "recompute" if second_moment else chosen["old"],
                "top_entropy_quantile": chosen["forks"],
                "mask_truncated": chosen["cut"],
            },
            "data": {"prompt_dataset": "d.jsonl"},
            "reward": {"weights": PARTS},
            "rollout": {"max_new_tokens": 8},
        }
    )


def played(seed: int, *, most_turns: int = 2, reward: float | None = None) -> list[Trajectory]:
    """Up to three groups of episodes of one turn or two, all with one outcome if there is a `reward`."""
    rng, found = random.Random(seed), []
    for group in range(rng.randint(1, 3)):
        for sample in range(rng.randint(2, 4)):
            turns = [rng.choices(TOKENS, k=rng.randint(1, 5)) for _ in range(rng.randint(1, most_turns))]
            parts = {name: rng.choice([0.0, 1.0]) if reward is None else reward for name in PARTS}
            earned = sum(PARTS[name] * value for name, value in parts.items())
            made = make_trajectory(
                [50, 51],
                *([turns[0], [60, 61], turns[1]] if len(turns) == 2 else turns),
                group_id=group,
                sample_id=10 * group + sample,
                rewards=[0.0] * (len(turns) - 1) + [earned],
                logprob=-rng.uniform(4.0, 7.0),
                stop_reason=rng.choice([StopReason.STOP, StopReason.STOP, StopReason.LENGTH]),
                reward_parts=parts,
            )
            found.append(
                evolve(
                    made,
                    segments=tuple(
                        evolve(segment, state=rng.randint(0, 1)) if segment.kind is SegmentKind.ACTION else segment
                        for segment in made.segments
                    ),
                )
            )
    return found


def learnt(
    config: RLConfig,
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int = 10_000,
    shares: int = 1,
    skip: bool = True,
) -> Tensor:
    """The policy's logits after two epochs of one optimizer step each."""
    needs = ESTIMATORS[config.algo.advantage.estimator].needs
    policy = FakePolicy(LOGITS)
    critic = FakeValue() if "critic" in needs else None
    batch = (
        ExperienceService(
            policy,
            reference=FakeReference(-LOGITS) if config.algo.kl.init_coef else None,
            critic=critic,
            algo=config.algo,
            reward=config.reward,
            max_length=8,
            max_tokens=max_tokens,
            shares=shares,
            steps_per_rollout=2,
            always_scores=always_scores(config),
        )
        .make(trajectories, config.algo.kl.init_coef, BASELINES if "greedy_baseline" in needs else None)
        .batch
    )
    update = UpdateService(
        policy,
        critic,
        aggregation=Aggregation(make_aggregation(config)),
        max_length=8,
        batch_size=None,
        epochs=2,
        max_tokens=max_tokens,
        shares=shares,
        seed=0,
        skip_idle=skip and advantage_is_all(config),
        select=make_token_selection(config),
        keep=make_token_filter(config),
        learn=make_learned_tokens(config),
        mask_truncated=config.algo.mask_truncated,
    )
    objective = make_objective(config, kl_coef=config.algo.kl.init_coef, entropy_coef=0.0, version=1)
    update.run(batch, objective, None if critic is None else ClippedValueObjective(clip=0.2))
    table_V: Tensor = policy.state_dict()["table"]
    assert table_V.isfinite().all()
    return table_V


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    **combination,
    max_tokens=st.sampled_from([16, 24, 60]),
    shares=st.integers(1, 3),
    kl_coef=st.sampled_from([0.0, 0.1]),
)
def test_neither_division_nor_order_changes_what_is_learnt(
    estimator: str, seed: int, max_tokens: int, shares: int, kl_coef: float, **chosen: Any
) -> None:
    teacher = "teacher" in ESTIMATORS[estimator].needs
    config = config_of(estimator, kl_coef=0.1 if teacher else kl_coef, **chosen)
    trajectories = played(seed)
    whole_V = learnt(config, trajectories)
    shuffled = random.Random(seed + 1).sample(trajectories, len(trajectories))
    divided_V = learnt(config, shuffled, max_tokens=max_tokens, shares=shares, skip=False)
    torch.testing.assert_close(divided_V, whole_V, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "estimator", [name for name, traits in ESTIMATORS.items() if "group" in traits.needs or name == "flash_reinforce"]
)
@settings(max_examples=EXAMPLES, deadline=None)
@given(**combination, reward=st.sampled_from([0.0, 0.1, 1.0]))
def test_rewards_that_are_all_equal_teach_nothing(estimator: str, seed: int, reward: float, **chosen: Any) -> None:
    if chosen["loss"] in ("kl_cov", "dro"):  # which hold the policy near another one as well
        chosen["loss"] = "ppo"
    # Where turns are compared, those of one episode have different rewards.
    most_turns = 1 if estimator in ("process_group_norm", "turn_group_norm", "gigpo") else 2
    found_V = learnt(config_of(estimator, **chosen), played(seed, most_turns=most_turns, reward=reward))
    torch.testing.assert_close(found_V, LOGITS, rtol=0, atol=1e-6)
