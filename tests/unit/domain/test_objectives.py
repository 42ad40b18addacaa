"""The whole objective of policy and critic, all terms and metrics, against loops over tokens in float64."""

import math

import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.contract import PolicyLossParams
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.algorithms.losses.value import value_loss
from rollgrad.domain.algorithms.settings import CorrectionGate, CorrectionLevel, CorrectionMode, CorrectionSettings
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.ports.models import TokenScores
from tests.unit.domain.references import clamp
from tests.unit.domain.test_losses import batch_of

EXAMPLES = settings(max_examples=15, deadline=None)
SEEDS = st.integers(0, 10**6)
LOW, HIGH, HIGHEST = 0.2, 0.3, 1.1
"""Clip range of the ratio, and the bound of the correction's weight."""
KL, ENTROPY, NLL = 0.7, 0.11, 0.23
"""Coefficients of the terms."""
VERSION = 3


def k3(x: float) -> float:
    """KL(first || second) of the samples of the first (Schulman 2020), x = log first - log second."""
    return math.exp(-x) - 1 + x


def divergence(kind: str, x: float) -> tuple[float, float]:
    """(estimate of the KL to the reference, its slope), each within a bound of 10."""
    value, slope = {"k1": (x, 1.0), "k2": (x * x / 2, x), "k3": (k3(x), 1 - math.exp(-x))}[kind]
    return clamp(value, -10.0, 10.0), slope if abs(value) < 10 else 0.0


def random_step(seed: int, *, proximal: str) -> tuple[RolloutBatch, Tensor, Tensor]:
    """(a step's batch, the policy's log-probs, its entropies); `proximal`: from where old log-probs come. Those
    of the sampler make the loss's own ratio the correction."""
    batch, generator = batch_of(seed, "token_mean"), torch.Generator().manual_seed(seed)
    mask_N = batch.action_mask_N
    near, far, entropy_N = torch.rand(3, batch.token_count, generator=generator, dtype=torch.float64).unbind()
    theta_N = torch.where(mask_N, batch.filled("old_logprobs_N") + near - 0.5, 0.0)
    equal_N = torch.rand(batch.token_count, generator=generator) < 0.3
    rollout_N = torch.where(equal_N, batch.filled("old_logprobs_N"), batch.filled("old_logprobs_N") + far - 0.5)
    rollout_N = torch.where(mask_N, rollout_N, 0.0)
    return (
        evolve(
            batch,
            rollout_logprobs_N=rollout_N,
            old_logprobs_N={"recomputed": batch.old_logprobs_N, "sampler": rollout_N}.get(proximal),
            versions_N=torch.randint(0, VERSION + 1, (batch.token_count,), generator=generator, dtype=torch.int32),
            positive_weights_N=torch.where(mask_N & (entropy_N > 0.4), 0.3 * entropy_N, 0.0),
            learned_N=torch.rand(batch.token_count, generator=generator) < 0.8,
        ),
        theta_N,
        entropy_N,
    )


@define
class Expected:
    """Results of an objective, added up token by token."""

    slope_N: list[float]
    """Gradient at each log-prob."""
    entropy_slope_N: list[float]
    """Gradient at each entropy."""
    clipped_N: list[bool]
    loss: float = 0.0
    metrics: dict[str, float] = field(factory=dict)


def token_by_token(
    batch: RolloutBatch,
    theta_N: Tensor,
    entropy_N: Tensor,
    *,
    proximal: str,
    corrected: bool,
    kind: str,
    against: str,
) -> Expected:
    """Returns the loss of PPO with all its terms, its gradients and its metrics."""
    count = batch.token_count
    expected = Expected([0.0] * count, [0.0] * count, [False] * count)
    for t in batch.action_mask_N.nonzero()[:, 0].tolist():
        weight, advantage = float(batch.filled("loss_weights_N")[t]), float(batch.filled("advantages_N")[t])
        new, mu, entropy = float(theta_N[t]), float(batch.rollout_logprobs_N[t]), float(entropy_N[t])
        old = proximal_logprob(batch, t, new, proximal)
        rho = math.exp(new - old)
        plain, clipped = rho * advantage, clamp(rho, 1 - LOW, 1 + HIGH) * advantage
        is_clipped = clipped < plain
        off = math.exp((new if proximal == "sampler" else old) - mu)
        factor = (1.0 if proximal == "sampler" else off) if off <= HIGHEST else 0.0
        learned = bool(batch.learned_N is not None and batch.learned_N[t])
        counts = (factor if corrected else 1.0) * learned
        policy = -min(plain, clipped) * counts
        compared = mu if against == "rollout" else float(batch.filled("ref_logprobs_N")[t])
        kl, kl_slope = divergence(kind, new - compared)
        positive = float(batch.filled("positive_weights_N")[t])
        expected.clipped_N[t] = is_clipped
        expected.loss += weight * (policy + KL * kl - ENTROPY * entropy) - NLL * positive * new
        expected.slope_N[t] = weight * (-plain * counts * (not is_clipped) + KL * kl_slope) - NLL * positive
        expected.entropy_slope_N[t] = -weight * ENTROPY
        columns = {
            "policy_loss": policy,
            "entropy": entropy,
            "high_entropy_share": float(learned),
            "approx_kl": k3(old - new),
            "ratio_mean": rho,
            "clip_low_share": float(is_clipped and advantage < 0),
            "clip_high_share": float(is_clipped and advantage > 0),
            "mismatch_kl": k3(mu - old),
            "mismatch_abs": abs(old - mu),
            "mismatch_equal_share": float(old == mu),
            "mismatch_weight": math.exp(old - mu),
            "mismatch_weight_squared": math.exp(old - mu) ** 2,
            "ref_kl": kl,
            "positive_nll": -positive * new / weight,
        }
        if corrected:
            columns |= {"correction_weight": factor, "correction_dropped_share": float(factor == 0)}
        for name, value in columns.items():
            expected.metrics[name] = expected.metrics.get(name, 0.0) + weight * value
    return expected


def proximal_logprob(batch: RolloutBatch, t: int, new: float, proximal: str) -> float:
    """Returns the log-prob of a token that its ratio starts from; `new` is the policy's own."""
    mu = float(batch.rollout_logprobs_N[t])
    if proximal == "interpolated":
        age = max(1, VERSION - int(batch.versions_N[t]))
        return mu + (new - mu) * (age - 1) / age
    if proximal == "recomputed":
        return float(batch.filled("old_logprobs_N")[t])
    return mu if proximal == "sampler" else new


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("proximal", ["recomputed", "interpolated", "sampler", "none"])
@EXAMPLES
@given(seed=SEEDS, kind=st.sampled_from(["k1", "k2", "k3"]), against=st.sampled_from(["reference", "rollout"]))
def test_loss_gradient_and_metrics_are_the_sum_over_tokens(
    proximal: str, corrected: bool, seed: int, kind: str, against: str
) -> None:
    batch, theta_N, entropy_N = random_step(seed, proximal=proximal)
    correction = CorrectionSettings(
        level=CorrectionLevel.TOKEN, mode=CorrectionMode.MASK, gate=CorrectionGate.RATIO, low=0.0, high=HIGHEST
    )
    objective = PolicyLossObjective(
        params=PolicyLossParams(eps_clip_low_high=(LOW, HIGH)),
        correction=correction if corrected else None,
        bypass=proximal == "sampler",
        kl_coef=KL,
        kl_estimator=kind,
        kl_against=against,
        entropy_coef=ENTROPY,
        positive_nll_coef=NLL,
        version=VERSION if proximal == "interpolated" else None,
    )
    leaf, entropy = theta_N.clone().requires_grad_(), entropy_N.clone().requires_grad_()
    found = objective(TokenScores(logprobs_N=leaf, entropy_N=entropy), batch)
    gradients = torch.autograd.grad(found.loss, (leaf, entropy))

    expected = token_by_token(
        batch, theta_N, entropy_N, proximal=proximal, corrected=corrected, kind=kind, against=against
    )
    metrics = {name: float(value) for name, value in found.metrics.items()}
    assert float(found.loss.detach()) == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    assert metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-9)
    assert found.clipped_N is not None
    assert found.clipped_N.tolist() == expected.clipped_N
    for gradient_N, wanted in zip(gradients, (expected.slope_N, expected.entropy_slope_N), strict=True):
        torch.testing.assert_close(gradient_N, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@EXAMPLES
@given(seed=SEEDS, clip=st.sampled_from([None, 0.2, 1.0]))
def test_the_critics_loss_gradient_and_metrics_are_the_sum_over_tokens(seed: int, clip: float | None) -> None:
    """PPO's value loss: the larger one of two squared errors, of which a clipped value has no gradient."""
    batch, generator = batch_of(seed, "token_mean"), torch.Generator().manual_seed(seed)
    values_N = batch.filled("values_N") + torch.randn(batch.token_count, generator=generator, dtype=torch.float64)
    leaf = values_N.clone().requires_grad_()
    found = ClippedValueObjective(clip=clip)(leaf, batch)
    (gradient_N,) = torch.autograd.grad(found.loss, leaf)
    loss, moved, wanted_N = 0.0, 0.0, [0.0] * batch.token_count
    for t in batch.action_mask_N.nonzero()[:, 0].tolist():
        weight, new = float(batch.filled("value_weights_N")[t]), float(values_N[t])
        old, target = float(batch.filled("values_N")[t]), float(batch.filled("returns_N")[t])
        near = new if clip is None else old + clamp(new - old, -clip, clip)
        loss += weight * max((new - target) ** 2, (near - target) ** 2) / 2
        moved += weight * (near != new)
        wanted_N[t] = weight * (new - target) * ((new - target) ** 2 >= (near - target) ** 2)
    metrics = {"value_loss": loss} | ({} if clip is None else {"value_clip_share": moved})
    assert float(found.loss.detach()) == pytest.approx(loss, rel=1e-9)
    assert {name: float(value) for name, value in found.metrics.items()} == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient_N, torch.tensor(wanted_N, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (2.0, 1.0, 0.5, 1.0),  # too far up, beyond the target: the plain error is the larger one
        (2.0, 4.0, 6.125, 0.0),  # on its way to the target, but too far at once: nothing pulls it on
        (-2.0, -1.0, 0.5, -1.0),
        (-2.0, -4.0, 6.125, 0.0),
        (0.4, 1.0, 0.18, -0.6),  # not far at all
    ],
)
def test_value_clipping_by_hand(value: float, target: float, loss: float, slope: float) -> None:
    leaf = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_loss(leaf, torch.zeros(1), torch.tensor([target]), clip=0.5)
    assert float(found.detach()) == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), leaf)[0].item() == pytest.approx(slope)
