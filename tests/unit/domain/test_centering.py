"""Score centering against the mean score of the whole vocabulary, differentiated in float64."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.catalogue import POLICY_LOSSES
from rollgrad.domain.algorithms.losses import policy  # noqa: F401 (registers the losses)
from rollgrad.domain.algorithms.losses.centering import LEAST_TAIL, CentredScores, SamplerHead, ScoreCentering
from rollgrad.domain.algorithms.losses.contract import POLICY_LOSSES as FUNCTIONS
from rollgrad.domain.algorithms.losses.contract import PolicyLossInput, PolicyLossParams
from rollgrad.domain.algorithms.losses.corrections import correction_weights
from rollgrad.domain.algorithms.settings import CorrectionLevel, CorrectionMode, CorrectionSettings

CORRECTIONS: dict[str, CorrectionSettings | None] = {
    "none": None,
    **{
        mode.value: CorrectionSettings(level=CorrectionLevel.TOKEN, mode=mode, low=0.6, high=1.7)
        for mode in CorrectionMode
    },
}
EXAMPLES = settings(max_examples=5, deadline=None)
SEEDS = st.integers(0, 10**6)
PLACES, VOCABULARY = 3, 6


def drawn(seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits of a policy, which have a gradient, and log-probs of another one, [A, V], float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, PLACES, VOCABULARY, generator=generator, dtype=torch.float64) * spread
    return logits.requires_grad_(), other.log_softmax(1)


def head(sampler_AV: Tensor, count: int) -> SamplerHead:
    top = sampler_AV.topk(count, dim=1)
    return SamplerHead(ids_AK=top.indices, logprobs_AK=top.values)


def centred(logits: Tensor, sampler_AV: Tensor, count: int, correction: CorrectionSettings | None) -> CentredScores:
    known = head(sampler_AV, count)
    return ScoreCentering(correction)(logits.log_softmax(1).gather(1, known.ids_AK), known)


def weight(correction: CorrectionSettings | None, ratio: float) -> float:
    """The weight of a token by its ratio policy / sampler, from the docstring of `corrections`."""
    if correction is None:
        return 1.0
    if correction.mode is CorrectionMode.TRUNCATE:
        return min(ratio, correction.high)
    if correction.mode is CorrectionMode.CLIP:
        return max(correction.low, min(ratio, correction.high))
    return ratio if correction.low <= ratio <= correction.high else 0.0


def whole_mean(logits: Tensor, sampler_AV: Tensor, correction: CorrectionSettings | None) -> Tensor:
    """The gradient at the logits of sum over the vocabulary of sampler x weight x log policy, by definition."""
    own = logits.log_softmax(1)
    masses = [
        [math.exp(q) * weight(correction, math.exp(p - q)) for p, q in zip(ps, qs, strict=True)]
        for ps, qs in zip(own.tolist(), sampler_AV.tolist(), strict=True)
    ]
    (gradient,) = torch.autograd.grad((torch.tensor(masses, dtype=torch.float64) * own).sum(), logits)
    return gradient


def gradient_of(term: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(term.sum(), logits)
    return gradient


@pytest.mark.parametrize("name", CORRECTIONS)
@EXAMPLES
@given(seed=SEEDS)
def test_a_head_of_all_tokens_gives_the_mean_of_the_whole_vocabulary(name: str, seed: int) -> None:
    logits, sampler = drawn(seed)
    found = centred(logits, sampler, VOCABULARY, CORRECTIONS[name])
    torch.testing.assert_close(gradient_of(found.term_A, logits), whole_mean(logits, sampler, CORRECTIONS[name]))
    torch.testing.assert_close(found.policy_mass_A, torch.ones(PLACES, dtype=torch.float64))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("count", [1, 3, 5])
@EXAMPLES
@given(seed=SEEDS, rest=st.floats(0.3, 3.0))
def test_a_tail_in_proportion_to_the_policys_loses_nothing(name: str, count: int, seed: int, rest: float) -> None:
    """The head alone gives the mean of the vocabulary where the sampler is what the estimator takes it for."""
    logits, other = drawn(seed)
    known = other.topk(count, dim=1).indices
    outside = torch.ones_like(other, dtype=torch.bool).scatter(1, known, False)
    tail = torch.where(outside, logits.detach().softmax(1), 0.0)
    tail = tail / tail.sum(1, keepdim=True) * 0.2 * rest / 3
    inside = torch.where(outside, 0.0, other.exp())
    sampler = tail + inside / inside.sum(1, keepdim=True) * (1 - tail.sum(1, keepdim=True))
    ranked = SamplerHead(ids_AK=known, logprobs_AK=sampler.log().gather(1, known))
    own = logits.log_softmax(1).gather(1, known)
    found = gradient_of(ScoreCentering(CORRECTIONS[name])(own, ranked).term_A, logits)
    torch.testing.assert_close(found, whole_mean(logits, sampler.log(), CORRECTIONS[name]))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("count", [1, 3, VOCABULARY])
def test_nothing_is_taken_out_where_the_policy_samples_itself(name: str, count: int) -> None:
    logits, _ = drawn(1)
    found = centred(logits, logits.detach().log_softmax(1), count, CORRECTIONS[name])
    assert found.residual_A.abs().max() < 1e-9
    assert gradient_of(found.term_A, logits).abs().max() < 1e-9


def test_weights_that_are_bounded_nowhere_leave_nothing() -> None:
    """Importance sampling is unbiased: the mean score is 0 already."""
    logits, sampler = drawn(2)
    free = CorrectionSettings(level=CorrectionLevel.TOKEN, mode=CorrectionMode.TRUNCATE, high=1e9)
    assert centred(logits, sampler, 3, free).residual_A.abs().max() < 1e-9


@pytest.mark.parametrize(("low", "high", "other", "own_other"), [(1.0, 1.5, 0.5, 0.3), (0.5, 1.0, 0.05, 0.45)])
def test_a_ratio_at_a_bound_of_the_mask_counts(low: float, high: float, other: float, own_other: float) -> None:
    """The token on which both agree keeps its mass of 0.4; all others have ratios out of bounds."""
    mask = CorrectionSettings(level=CorrectionLevel.TOKEN, mode=CorrectionMode.MASK, low=low, high=high)
    sampler_AK, own_AK = torch.tensor([[[0.4, other]], [[0.4, own_other]]], dtype=torch.float64).log()
    known = SamplerHead(ids_AK=torch.tensor([[0, 1]]), logprobs_AK=sampler_AK)
    assert ScoreCentering(mask)(own_AK, known).residual_A.item() == pytest.approx(0.4)


@pytest.mark.parametrize("name", CORRECTIONS)
@EXAMPLES
@given(seed=SEEDS)
def test_an_advantage_that_all_tokens_share_moves_nothing(name: str, seed: int) -> None:
    """The gradient of the whole loss, with its weights, averaged over what the sampler draws at one place."""
    logits, sampler = drawn(seed)
    correction, advantage = CORRECTIONS[name], 1.3
    own = logits.log_softmax(1)
    term = advantage * centred(logits, sampler, VOCABULARY, correction).term_A.sum()
    loss = torch.tensor(0.0, dtype=torch.float64)
    for token in range(VOCABULARY):  # the loss at each place where that token was drawn, times how likely that is
        logprobs, rollout = own[:, token], sampler[:, token]
        everywhere = torch.ones(PLACES, dtype=torch.bool)
        weights = (
            torch.ones(PLACES, dtype=torch.float64)
            if correction is None
            else correction_weights(
                correction,
                logprobs_N=logprobs,
                rollout_logprobs_N=rollout,
                advantages_N=torch.ones(PLACES),
                action_mask_N=everywhere,
                sequence_N=torch.arange(PLACES),
                sequences=PLACES,
            )
        )
        loss = loss + (rollout.exp() * -advantage * weights * logprobs).sum()
    alone, taken_out = (torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (loss, term))
    assert (alone + taken_out).abs().max() < 1e-9
    assert (alone - advantage * -whole_mean(logits, sampler, correction)).abs().max() < 1e-9


@pytest.mark.parametrize("name", CORRECTIONS)
@EXAMPLES
@given(seed=SEEDS, count=st.integers(1, VOCABULARY))
def test_the_formula_of_the_paper(name: str, seed: int, count: int) -> None:
    """Eq. 14 as plain loops: rho, the masses inside and outside of the head, and what is left of them."""
    logits, sampler = drawn(seed, spread=random.Random(seed).choice([0.1, 1.5, 8.0]))
    logits, known, correction = logits.detach(), head(sampler, count), CORRECTIONS[name]
    found = centred(logits, sampler, count, correction)
    for place in range(PLACES):
        p = [math.exp(logits.log_softmax(1)[place, v]) for v in known.ids_AK[place].tolist()]
        q = [math.exp(x) for x in known.logprobs_AK[place].tolist()]
        rho = max(1 - math.fsum(q), LEAST_TAIL) / max(1 - math.fsum(p), LEAST_TAIL)
        alpha = rho * weight(correction, 1 / rho)
        left = [b * weight(correction, a / b) - alpha * a for a, b in zip(p, q, strict=True)]
        assert found.residual_A[place].item() == pytest.approx(math.fsum(map(abs, left)), abs=1e-6)
        term = math.fsum(c * math.log(a) for c, a in zip(left, p, strict=True))
        assert found.term_A[place].item() == pytest.approx(term, rel=1e-6, abs=1e-6)


def test_places_of_which_nobody_said_anything_stay_as_they_are() -> None:
    logits, sampler = drawn(3)
    known = head(sampler, 3)
    logprobs = known.logprobs_AK.clone()
    logprobs[1, 2], logprobs[2] = -math.inf, -math.inf
    own = logits.log_softmax(1).gather(1, known.ids_AK)
    found = ScoreCentering()(own, SamplerHead(ids_AK=known.ids_AK, logprobs_AK=logprobs))
    two = ScoreCentering()(own[:, :2], SamplerHead(ids_AK=known.ids_AK[:, :2], logprobs_AK=known.logprobs_AK[:, :2]))
    assert found.term_A[1] == two.term_A[1]
    assert found.term_A[2] == found.residual_A[2] == 0
    assert (gradient_of(found.term_A, logits)[2] == 0).all()


def test_tokens_that_are_impossible_to_the_policy_count_as_if_nobody_had_named_them() -> None:
    logits = torch.tensor([[0.5, -0.5, 0.2, -math.inf]], requires_grad=True)
    own = logits.log_softmax(1)
    sampler = SamplerHead(ids_AK=torch.tensor([[0, 1, 3]]), logprobs_AK=torch.tensor([[-1.0, -1.5, -2.0]]))
    found = ScoreCentering()(own[:, [0, 1, 3]], sampler)
    without = ScoreCentering()(
        own[:, :2], SamplerHead(ids_AK=sampler.ids_AK[:, :2], logprobs_AK=sampler.logprobs_AK[:, :2])
    )
    assert found.term_A == without.term_A
    assert found.residual_A == without.residual_A
    assert gradient_of(found.term_A, logits)[0, :2].isfinite().all()


@pytest.mark.parametrize("name", [name for name, traits in POLICY_LOSSES.items() if traits.by_token])
def test_losses_by_token_have_the_score_as_their_gradient(name: str) -> None:
    """At a ratio of 1 that of each token's log-prob is minus its advantage: what is taken out is the mean of it."""
    old = torch.tensor([-0.3, -2.0, -1.1, -4.0], dtype=torch.float64)
    logprobs = old.clone().requires_grad_()
    advantages = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)
    inputs: dict[str, Any] = {"action_mask_N": torch.ones(4, dtype=torch.bool), "selected_N": None}
    result = FUNCTIONS[name](
        PolicyLossInput(
            logprobs_N=logprobs,
            old_logprobs_N=old,
            advantages_N=advantages,
            sequence_N=torch.tensor([0, 0, 1, 1]),
            sequences=2,
            **inputs,
        ),
        PolicyLossParams(policy_loss_type=name),
    )
    (gradient,) = torch.autograd.grad(result.loss_N.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
