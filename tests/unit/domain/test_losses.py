"""Losses against formulas, and the promise that a step may be split in any way."""

import math
import pickle
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.aggregation import loss_weights, weighted_sum
from rollgrad.domain.algorithms.losses.contract import PolicyLoss, PolicyLossInput, PolicyLossParams, policy_loss
from rollgrad.domain.algorithms.losses.kl import kl_estimate, kl_estimator
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.batches.by_sequence import rollout_ids
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TokenScores
from tests.unit.domain.references import random_batch

MODES = ["token_mean", "sequence_mean", "prompt_mean", "constant_length", "sequence_sum", "token_sum"]
EXAMPLES = settings(max_examples=30, deadline=None)
SEEDS = st.integers(0, 10**6)


def batch_of(seed: int, mode: str) -> RolloutBatch:
    """A random batch with every column filled in."""
    sequences = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(s.actions) for s in sequences])
    mask = torch.tensor([a for s in sequences for a in s.actions])
    total = len(mask)

    def noise(scale: float = 1.0) -> Tensor:
        return torch.where(mask, scale * torch.randn(total, generator=generator, dtype=torch.float64), 0.0)

    groups, samples = torch.tensor([s.group for s in sequences]), torch.tensor([s.sample for s in sequences])
    weights = loss_weights(
        mode,
        action_mask_N=mask,
        lengths_S=lengths,
        group_ids_S=groups,
        rollout_ids_S=rollout_ids(groups, samples),
        max_length=20,
    )
    return RolloutBatch(
        tokens_N=torch.zeros(total, dtype=torch.int64),
        action_mask_N=mask,
        turn_ids_N=torch.where(mask, 0, -1),
        rewards_N=noise(),
        rollout_logprobs_N=noise(),
        versions_N=torch.zeros(total, dtype=torch.int32),
        lengths_S=lengths,
        prompt_lengths_S=torch.ones_like(lengths),
        group_ids_S=groups,
        sample_ids_S=samples,
        scores_S=torch.zeros(len(lengths)),
        truncated_S=torch.zeros(len(lengths), dtype=torch.bool),
        old_logprobs_N=noise(0.3),
        ref_logprobs_N=noise(0.3),
        values_N=noise(),
        advantages_N=noise(),
        returns_N=noise(),
        loss_weights_N=weights.double(),
        value_weights_N=weights.double(),
    )


OBJECTIVE = PolicyLossObjective(
    params=PolicyLossParams(eps_clip_low_high=(0.2, 0.3), dual_clip=3.0),
    kl_coef=0.1,
    kl_estimator="k3",
    entropy_coef=0.01,
)


def policy_gradient(batch: RolloutBatch, theta_N: Tensor, objective: PolicyLossObjective = OBJECTIVE) -> Tensor:
    """Gradient at the log-probs, with the entropy a (linear) function of them."""
    leaf = theta_N.clone().requires_grad_()
    loss = objective(TokenScores(logprobs_N=leaf, entropy_N=-2 * leaf), batch).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


@pytest.mark.parametrize("mode", MODES)
@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 5))
def test_any_split_in_any_order_gives_the_same_gradient(mode: str, seed: int, parts: int) -> None:
    batch = batch_of(seed, mode)
    generator = torch.Generator().manual_seed(seed)
    theta_N = torch.randn(batch.token_count, generator=generator, dtype=torch.float64) * 0.3
    whole = policy_gradient(batch, theta_N)
    carried = evolve(batch, rewards_N=theta_N)  # a column that select() carries along
    index = evolve(batch, rewards_N=torch.arange(batch.token_count))
    order = torch.randperm(len(batch), generator=generator)
    summed = torch.zeros_like(whole)
    for part in order.tensor_split(min(parts, len(batch))):
        piece = carried.select(part)
        summed[index.select(part).rewards_N] += policy_gradient(piece, piece.rewards_N)
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@EXAMPLES
@given(seed=SEEDS)
def test_weights_are_the_formula(mode: str, seed: int) -> None:
    batch = batch_of(seed, mode)
    ids, mask = batch.rollout_ids_S[batch.sequence_ids_N].tolist(), batch.action_mask_N.tolist()
    groups = dict(zip(batch.rollout_ids_S.tolist(), batch.group_ids_S.tolist(), strict=True))
    count: dict[int, int] = {}
    for rollout, action in zip(ids, mask, strict=True):
        count[rollout] = count.get(rollout, 0) + action
    nonempty = [s for s, c in count.items() if c]
    per_group: dict[int, int] = {}
    for s, c in count.items():
        per_group[groups[s]] = per_group.get(groups[s], 0) + c
    live_groups = sum(c > 0 for c in per_group.values())

    def weight(rollout: int) -> float:
        return {
            "token_mean": 1 / sum(count.values()),
            "sequence_mean": 1 / (len(nonempty) * max(1, count[rollout])),
            "prompt_mean": 1 / (live_groups * max(1, per_group[groups[rollout]])),
            "constant_length": 1 / (len(nonempty) * 20),
            "sequence_sum": 1 / len(nonempty),
            "token_sum": 1.0,
        }[mode]

    wanted = [weight(s) if action else 0.0 for s, action in zip(ids, mask, strict=True)]
    assert batch.loss_weights_N is not None
    torch.testing.assert_close(batch.loss_weights_N, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_weights_without_actions_are_zero(mode: str) -> None:
    weights = loss_weights(
        mode,
        action_mask_N=torch.zeros(3, dtype=torch.bool),
        lengths_S=torch.tensor([3]),
        group_ids_S=torch.tensor([0]),
        rollout_ids_S=torch.tensor([0]),
        max_length=4,
    )
    assert torch.equal(weights, torch.zeros(3))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_the_loss_of_a_masked_token_does_not_count(poison: float) -> None:
    loss_N = torch.tensor([2.0, poison, -1.0], requires_grad=True)
    total = weighted_sum(loss_N, torch.tensor([0.5, 0.0, 0.25]), torch.tensor([True, False, True]))
    assert float(total) == 0.75
    assert torch.autograd.grad(total, loss_N)[0].tolist() == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@EXAMPLES
@given(seed=SEEDS)
def test_what_is_masked_changes_neither_loss_nor_gradient(poison: float, seed: int) -> None:
    batch = batch_of(seed, "token_mean")
    mask = batch.action_mask_N
    theta_N = torch.where(mask, batch.rollout_logprobs_N * 0.3, 0.0)

    def spoil(column: Tensor | None) -> Tensor:
        assert column is not None
        return torch.where(mask, column, poison)

    poisoned = evolve(
        batch,
        **{
            name: spoil(getattr(batch, name))
            for name in ("old_logprobs_N", "ref_logprobs_N", "advantages_N", "values_N", "returns_N")
        },
    )
    clean_gradient = policy_gradient(batch, theta_N)
    spoiled_gradient = policy_gradient(poisoned, spoil(theta_N))
    assert torch.equal(clean_gradient, spoiled_gradient)
    values = ClippedValueObjective(clip=0.5)
    leaf, spoiled = theta_N.clone().requires_grad_(), spoil(theta_N).requires_grad_()
    first, second = values(leaf, batch), values(spoiled, poisoned)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(*(torch.autograd.grad(o.loss, x)[0] for o, x in ((first, leaf), (second, spoiled))))
    assert all(math.isfinite(float(v)) for v in second.metrics.values())


@pytest.mark.parametrize(
    ("x", "kind", "wanted"),
    [
        (0.5, "k1", 0.5),
        (0.5, "k2", 0.125),
        (0.5, "k3", 0.106531),
        (-0.5, "k3", 0.148721),
        (0.0, "k3", 0.0),
        *((-0.5, "abs", 0.5), (-12.0, "abs", 10.0)),
        *((12.0, "k1", 10.0), (-12.0, "k1", -10.0), (5.0, "k2", 10.0), (-3.0, "k3", 10.0)),  # beyond the bound
        (-3.0, "k3_unbiased", 16.085537),  # which has none
    ],
)
def test_kl_by_hand(x: float, kind: str, wanted: float) -> None:
    assert float(kl_estimate(torch.tensor([x]), torch.zeros(1), kind, torch.ones(1))) == pytest.approx(wanted, abs=1e-6)


def objective_of_squares(batch: Any) -> tuple[PolicyLossObjective, torch.Tensor]:
    """An objective with a KL estimator of somebody's own, rho x^2, and its gradient at each token of the batch."""

    @kl_estimator("squares")
    def squares(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
        return ratio_N * (logprobs_N - ref_logprobs_N).square()

    objective = PolicyLossObjective(kl_coef=0.5, kl_estimator="squares")
    x_N, rho_N = -1.0 - batch.ref_logprobs_N, (-1.0 - batch.old_logprobs_N).exp()
    gradient_N = 0.5 * batch.loss_weights_N * rho_N * (2 * x_N + x_N.square())
    return pickle.loads(pickle.dumps(objective)), torch.where(batch.action_mask_N, gradient_N, 0.0)


def test_a_kl_estimator_of_ones_own_is_in_the_loss(algorithms_as_before: None) -> None:
    batch = batch_of(3, "token_mean")
    objective, expected_N = objective_of_squares(batch)

    def slope(objective: PolicyLossObjective) -> torch.Tensor:
        leaf = torch.full((batch.token_count,), -1.0, dtype=torch.float64, requires_grad=True)
        found = objective(TokenScores(logprobs_N=leaf, entropy_N=torch.zeros_like(leaf)), batch)
        return torch.autograd.grad(found.loss, leaf)[0]

    torch.testing.assert_close(slope(objective) - slope(evolve(objective, kl_coef=0.0)), expected_N)


@pytest.mark.parametrize("name", ["k3", "full"])
def test_a_kl_estimator_of_ones_own_replaces_none_of_rollgrads(name: str) -> None:
    with pytest.raises(ConfigurationError, match="choose another name"):
        kl_estimator(name)


def test_a_kl_estimator_has_a_value_for_each_token(algorithms_as_before: None) -> None:
    kl_estimator("mean")(lambda logprobs_N, ref_logprobs_N, ratio_N: (logprobs_N - ref_logprobs_N).mean())
    with pytest.raises(ConfigurationError, match=r"estimator mean returned estimates of shape \(\) for 2 tokens"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "mean")


def test_kl_estimators_agree_in_expectation() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    q = (p + 0.1 * torch.randn(20, generator=generator, dtype=torch.float64)).log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(exact, rel=1e-9)


def test_without_old_logprobs_the_ratio_is_one() -> None:
    batch = evolve(batch_of(3, "token_mean"), old_logprobs_N=None, ref_logprobs_N=None)
    objective = PolicyLossObjective()
    scores = TokenScores(
        logprobs_N=torch.randn(batch.token_count, dtype=torch.float64), entropy_N=torch.zeros(batch.token_count)
    )
    metrics = objective(scores, batch).metrics
    assert float(metrics["ratio_mean"]) == pytest.approx(1.0)
    assert float(metrics["approx_kl"]) == 0.0
    assert float(metrics["clip_low_share"] + metrics["clip_high_share"]) == 0.0


def brought(**columns: Any) -> PolicyLossObjective:
    """A policy loss of somebody's own, whose result has these columns in the place of its own."""

    @policy_loss("toy")
    def toy(inputs: PolicyLossInput, params: PolicyLossParams) -> PolicyLoss:
        never_N = torch.zeros_like(inputs.action_mask_N)
        loss = PolicyLoss(
            loss_N=-inputs.logprobs_N,
            ratio_N=torch.ones_like(inputs.logprobs_N),
            clipped_low_N=never_N,
            clipped_high_N=never_N,
        )
        return evolve(loss, **{name: make(inputs) for name, make in columns.items()})

    return PolicyLossObjective(loss="toy")


def test_a_loss_adds_metrics_that_are_means_as_its_own(algorithms_as_before: None) -> None:
    batch = batch_of(3, "sequence_mean")
    scores = TokenScores(logprobs_N=torch.zeros(len(batch.tokens_N)), entropy_N=torch.zeros(len(batch.tokens_N)))
    objective = brought(metrics_N=lambda inputs: {"gap": inputs.logprobs_N - inputs.rollout_logprobs_N})
    wanted = weighted_sum(-batch.rollout_logprobs_N, batch.filled("loss_weights_N"), batch.action_mask_N)
    assert float(objective(scores, batch).metrics["gap"]) == pytest.approx(float(wanted))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"loss_N": lambda inputs: inputs.logprobs_N.mean()},
            r"toy returned loss_N of shape \(\) for \d+ tokens: return",
        ),
        ({"metrics_N": lambda inputs: {"gap": 1.0}}, "toy returned gap of shape float"),
        ({"metrics_N": lambda inputs: {"entropy": inputs.logprobs_N}}, "reports entropy, which the update itself"),
    ],
)
def test_what_a_loss_may_not_return(columns: dict[str, Any], message: str, algorithms_as_before: None) -> None:
    batch = batch_of(3, "token_mean")
    scores = TokenScores(logprobs_N=torch.zeros(len(batch.tokens_N)), entropy_N=torch.zeros(len(batch.tokens_N)))
    with pytest.raises(ConfigurationError, match=message):
        brought(**columns)(scores, batch)


def test_missing_columns_are_named() -> None:
    batch = evolve(batch_of(3, "token_mean"), advantages_N=None)
    scores = TokenScores(logprobs_N=torch.zeros(batch.token_count), entropy_N=torch.zeros(batch.token_count))
    with pytest.raises(ValueError, match="advantages_N"):
        OBJECTIVE(scores, batch)


@EXAMPLES
@given(seed=SEEDS)
def test_the_unbiased_k3_has_the_gradient_of_the_divergence(seed: int) -> None:
    """Exact over a small vocabulary: E_old[rho k3] is KL(pi || ref), and so are their gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, ref = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3))
    leaf = logits.clone().requires_grad_()
    new, old, ref = leaf.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    exact = (new.exp() * (new - ref)).sum()
    estimate = (old.exp() * kl_estimate(new, ref, "k3_unbiased", (new - old).exp())).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (estimate, exact)))
