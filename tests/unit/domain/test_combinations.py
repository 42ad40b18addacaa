"""Every estimator with every loss, correction and aggregation: what holds for any combination.

The gradient at the log-probs does not depend on how the step is split over micro-batches or ranks, in which order its
samples come, what stands at masked places or how many masked tokens follow; and it equals that of the same loss written
down directly, weight by weight.
"""

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES, policy_loss_traits
from rollgrad.domain.algorithms.estimators import EstimatorInput, EstimatorParams, estimate
from rollgrad.domain.algorithms.losses.aggregation import loss_weights
from rollgrad.domain.algorithms.losses.contract import TOKEN_SELECTIONS, PolicyLossParams
from rollgrad.domain.algorithms.losses.corrections import within_second_moment
from rollgrad.domain.algorithms.losses.high_entropy import high_entropy_tokens
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import CorrectionSettings
from rollgrad.domain.batches.by_sequence import rollout_ids
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.ports.models import TokenScores
from tests.shards import shards
from tests.unit.domain.references import random_batch

AGGREGATIONS = ["token_mean", "sequence_mean", "prompt_mean", "constant_length", "sequence_sum", "token_sum"]
MOMENT = 0.05
"""Largest second moment."""
TRIPLES = [
    None,
    *(
        CorrectionSettings(level=level, mode=mode, gate=gate, low=0.7, high=1.5, threshold=0.05)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "clip", "mask")
        for gate in ("ratio", "binary_kl", "tv", "opsm")
    ),
    *(
        CorrectionSettings(level="token", mode=mode, gate="second_moment", low=0.7, high=1.5, threshold=MOMENT)
        for mode in ("truncate", "clip", "mask")
    ),
]


def make_batch(seed: int, estimator: str, loss: str, aggregation: str) -> tuple[RolloutBatch, Tensor]:
    """(a batch ready for the loss, log-probs of the current policy)."""
    generator = torch.Generator().manual_seed(seed)
    negative = "rewards_from_0" not in ESTIMATORS[estimator].needs
    sequences = [s for s in random_batch(seed, negative=negative) if any(s.actions)]
    mask = torch.tensor([a for s in sequences for a in s.actions])
    lengths = torch.tensor([len(s.actions) for s in sequences])
    total, count = len(mask), len(sequences)

    def column(values: list[float]) -> Tensor:
        return torch.where(mask, torch.tensor(values, dtype=torch.float64), 0.0)

    def noisy(base_N: Tensor, scale: float) -> Tensor:
        noise_N = scale * torch.randn(total, generator=generator, dtype=torch.float64)
        return torch.where(mask, (base_N + noise_N).clamp(max=-1e-3), 0.0)

    groups, samples = (torch.tensor([getattr(s, name) for s in sequences]) for name in ("group", "sample"))
    result = estimate(
        estimator,
        EstimatorInput(
            rewards_N=column([x for s in sequences for x in s.rewards]),
            token_rewards_N=column([x for s in sequences for x in s.extras]),
            values_N=column([x for s in sequences for x in s.values]),
            action_mask_N=mask,
            lengths_S=lengths,
            group_ids_S=groups,
            sample_ids_S=samples,
            baselines_S=torch.rand(count, generator=generator, dtype=torch.float64),
            reward_parts_SK=torch.rand(count, 2, generator=generator, dtype=torch.float64),
            part_weights_K=torch.tensor([1.0, 0.5]),
            state_ids_N=column([float(x) for s in sequences for x in s.states]).long(),
            logprobs_N=column([x for s in sequences for x in s.logprobs]),
            collision_N=column([x for s in sequences for x in s.collisions]),
        ),
        EstimatorParams(),
    )
    theta_N = noisy(torch.full((total,), -1.5, dtype=torch.float64), 0.5)
    old_N = noisy(theta_N, 0.3)
    batch = RolloutBatch(
        tokens_N=torch.arange(total),
        action_mask_N=mask,
        turn_ids_N=torch.where(mask, 0, -1),
        rewards_N=torch.zeros(total),
        rollout_logprobs_N=noisy(old_N, 0.3),
        versions_N=torch.zeros(total, dtype=torch.int32),
        lengths_S=lengths,
        prompt_lengths_S=torch.ones_like(lengths),
        group_ids_S=groups,
        sample_ids_S=samples,
        scores_S=torch.zeros(count),
        truncated_S=torch.zeros(count, dtype=torch.bool),
        old_logprobs_N=old_N,
        ref_logprobs_N=noisy(theta_N, 0.3),
        advantages_N=result.advantages_N,
        loss_weights_N=loss_weights(
            aggregation,
            action_mask_N=mask,
            lengths_S=lengths,
            group_ids_S=groups,
            rollout_ids_S=rollout_ids(groups, samples),
            max_length=20,
        ).double(),
    )
    kept_N = within_second_moment(old_N, batch.rollout_logprobs_N, mask, MOMENT)
    learned_N = high_entropy_tokens(-theta_N, mask, 0.5) if seed % 2 else None
    return evolve(batch, selected_N=select(batch, loss), kept_N=kept_N, learned_N=learned_N), theta_N


def select(batch: RolloutBatch, loss: str) -> Tensor | None:
    if loss not in TOKEN_SELECTIONS:
        return None
    return TOKEN_SELECTIONS[loss](batch, PolicyLossParams(cov_share=0.2, cov_range=(0.0, 5.0)))


def make_objective(loss: str, correction: CorrectionSettings | None) -> PolicyLossObjective:
    return PolicyLossObjective(
        loss=loss,
        params=PolicyLossParams(eps_clip_low_high=policy_loss_traits(loss).clip or (0.2, 0.2)),
        correction=correction,
        kl_coef=0.1,
        kl_estimator="full" if loss == "policy_gradient" else "k3_unbiased",
        entropy_coef=0.01,
    )


def gradient(objective: PolicyLossObjective, batch: RolloutBatch, theta_N: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, its gradient at the log-probs, the entropy and the divergence from a teacher being functions of them)."""
    leaf = theta_N.clone().requires_grad_()
    loss = objective(TokenScores(logprobs_N=leaf, entropy_N=-2 * leaf, divergence_N=3 * leaf), batch).loss
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


combination = {
    "seed": st.integers(0, 10**6),
    "estimator": st.sampled_from(list(ESTIMATORS)),
    "correction": st.sampled_from(TRIPLES),
}
EACH = st.fixed_dictionaries({name: st.tuples(*combination.values()) for name in AGGREGATIONS})
"""A combination for each aggregation."""


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=2, deadline=None)
@given(drawn=EACH, ranks=st.integers(1, 5))
def test_any_sharding_in_any_order_gives_the_same_gradient(loss: str, drawn: dict[str, Any], ranks: int) -> None:
    for aggregation, (seed, estimator, correction) in drawn.items():
        batch, theta_N = make_batch(seed, estimator, loss, aggregation)
        objective = make_objective(loss, correction)
        value, whole_N = gradient(objective, batch, theta_N)
        carried = evolve(batch, rewards_N=theta_N)  # a column that select() carries along
        summed_N, total = torch.zeros_like(whole_N), torch.zeros_like(value)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
        for part in shards(carried.select(order), ranks).parts:
            loss_part, gradient_part = gradient(objective, part, part.rewards_N)
            summed_N[part.tokens_N] += gradient_part
            total += loss_part
        torch.testing.assert_close(summed_N, whole_N, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(total, value, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=3, deadline=None)
@given(drawn=EACH, poison=st.sampled_from([math.nan, math.inf, -math.inf]), padding=st.integers(0, 3))
def test_masked_tokens_change_nothing(loss: str, drawn: dict[str, Any], poison: float, padding: int) -> None:
    for aggregation, (seed, estimator, correction) in drawn.items():
        batch, theta_N = make_batch(seed, estimator, loss, aggregation)
        objective = make_objective(loss, correction)
        value, clean_N = gradient(objective, batch, theta_N)
        # Every sequence is followed by `padding` more masked tokens, and all masked places are poisoned.
        source_N = torch.cat([torch.cat([part, part[-1:].expand(padding)]) for part in spans(batch)])
        keep_N = torch.cat([torch.arange(n + padding) < n for n in batch.lengths_S.tolist()])
        mask_N = batch.action_mask_N[source_N] & keep_N
        columns: dict[str, Any] = {}
        for name in ("rollout_logprobs_N", "old_logprobs_N", "ref_logprobs_N", "advantages_N"):
            columns[name] = torch.where(mask_N, batch.filled(name)[source_N], poison)
        for name in ("tokens_N", "turn_ids_N", "rewards_N", "versions_N"):
            columns[name] = getattr(batch, name)[source_N]
        padded = evolve(
            batch,
            **columns,
            action_mask_N=mask_N,
            lengths_S=batch.lengths_S + padding,
            loss_weights_N=torch.where(mask_N, batch.filled("loss_weights_N")[source_N], 0.0),
            selected_N=None if batch.selected_N is None else batch.selected_N[source_N] & mask_N,
            kept_N=batch.filled("kept_N")[source_N] & mask_N,
            learned_N=None if batch.learned_N is None else batch.learned_N[source_N],
        )
        found, poisoned_N = gradient(objective, padded, torch.where(mask_N, theta_N[source_N], poison))
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(poisoned_N[mask_N], clean_N[batch.action_mask_N], rtol=1e-12, atol=1e-15)
        assert not poisoned_N[~mask_N].any()


def spans(batch: RolloutBatch) -> list[Tensor]:
    return list(torch.arange(batch.token_count).split(batch.lengths_S.tolist()))


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=4, deadline=None)
@given(**combination, factor=st.sampled_from([2.0, 10.0]))
def test_the_policy_gradient_scales_with_the_advantages(
    loss: str, seed: int, estimator: str, correction: CorrectionSettings | None, factor: float
) -> None:
    if loss in ("kl_cov", "dro"):
        return  # their penalties do not
    batch, theta_N = make_batch(seed, estimator, loss, "token_mean")
    objective = evolve(make_objective(loss, correction), kl_coef=0.0, entropy_coef=0.0)
    _, once_N = gradient(objective, batch, theta_N)
    scaled = evolve(batch, advantages_N=batch.filled("advantages_N") * factor)
    torch.testing.assert_close(gradient(objective, scaled, theta_N)[1], once_N * factor, rtol=1e-9, atol=1e-12)
