"""Policy losses, KL estimates, aggregation and selection against loops, by value and by gradient."""

import math
import random
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rollgrad.domain.algorithms.losses.policy  # noqa: F401  (fills the table)
from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.losses.aggregation import loss_weights, weighted_sum
from rollgrad.domain.algorithms.losses.contract import POLICY_LOSSES, PolicyLoss, PolicyLossInput, PolicyLossParams
from rollgrad.domain.algorithms.losses.covariance import clip_cov_tokens, covariances, kl_cov_tokens, token_keys
from rollgrad.domain.algorithms.losses.kl import kl_estimate
from rollgrad.domain.algorithms.losses.ratios import ratio
from rollgrad.domain.batches.by_sequence import rollout_ids
from tests.unit.domain import references
from tests.unit.domain.references import LossSettings, Tokens, random_batch

NAMES = list(catalogue.POLICY_LOSSES)
ON_POLICY = ["ppo", "gspo_token", "sapo", "vespo", "topr", "dppo_tv", "dppo_kl", "cispo", "policy_gradient", "dro"]
"""Losses whose gradient at a ratio of 1 is -A of each token."""
CLIPPED_BY_RATIO = ["ppo", "clip_cov", "sequence_ppo", "gspo", "gspo_token"]
KL_KINDS = ["k1", "k2", "k3", "k3_unbiased", "abs"]
MODES = ["token_mean", "sequence_mean", "prompt_mean", "constant_length", "sequence_sum", "token_sum"]
EXAMPLES = settings(max_examples=12, deadline=None)
SEEDS = st.integers(0, 10**6)
OPTIONS = st.builds(
    LossSettings,
    clip_low=st.sampled_from([0.05, 0.2, 0.9]),
    clip_high=st.sampled_from([0.1, 0.28, 4.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    sapo_tau=st.sampled_from([(1.0, 1.05), (2.0, 0.5)]),
    cov_kl_coef=st.sampled_from([1.0, 0.1]),
    vespo_k=st.sampled_from([(2.0, 3.0), (0.0, 1.5)]),
    vespo_lambda=st.sampled_from([(3.0, 2.0), (0.5, 4.0)]),
    dro_beta=st.sampled_from([0.05, 2.0]),
)


def random_tokens(seed: int, spread: float = 0.5) -> Tokens:
    """Ragged sequences with masked places between; log-probs at most 0; 0 at masked places."""
    rng = random.Random(seed)
    sequence = [s for s in range(rng.randint(1, 4)) for _ in range(rng.randint(1, 5))]
    actions = [rng.random() < 0.8 for _ in sequence]
    actions[0] = True

    def column(draw: Callable[[], float]) -> list[float]:
        return [draw() if action else 0.0 for action in actions]

    old = column(lambda: -rng.expovariate(1.0) - 0.01)
    return Tokens(
        logprobs=[min(-1e-3, x + rng.gauss(0, spread)) if a else 0.0 for x, a in zip(old, actions, strict=True)],
        old=old,
        advantages=column(lambda: rng.gauss(0, 1)),
        actions=actions,
        sequence=sequence,
        selected=[a and rng.random() < 0.4 for a in actions],
    )


def loss_inputs(tokens: Tokens, logprobs_N: Tensor) -> PolicyLossInput:
    dtype = logprobs_N.dtype
    return PolicyLossInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=torch.tensor(tokens.old, dtype=dtype),
        advantages_N=torch.tensor(tokens.advantages, dtype=dtype),
        action_mask_N=torch.tensor(tokens.actions),
        sequence_N=torch.tensor(tokens.sequence),
        sequences=tokens.sequences,
        selected_N=torch.tensor(tokens.selected),
    )


def params_of(options: LossSettings) -> PolicyLossParams:
    rest = attrs.asdict(options)
    return PolicyLossParams(eps_clip_low_high=(rest.pop("clip_low"), rest.pop("clip_high")), **rest)


def run(
    name: str,
    tokens: Tokens,
    options: LossSettings | None = None,
    weights: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[PolicyLoss, Tensor]:
    """(the loss, the gradient of its weighted sum over action tokens)."""
    leaf = torch.tensor(tokens.logprobs, dtype=dtype, requires_grad=True)
    params = params_of(options or LossSettings())
    loss = POLICY_LOSSES[name](loss_inputs(tokens, leaf), params)
    chosen = torch.tensor(weights or [1.0] * len(tokens.actions), dtype=dtype)
    total = weighted_sum(loss.loss_N, chosen, torch.tensor(tokens.actions))
    (gradient,) = torch.autograd.grad(total, leaf)
    return attrs.evolve(loss, loss_N=loss.loss_N.detach(), ratio_N=loss.ratio_N.detach()), gradient


def single(logprob: float, old: float, advantage: float, *, selected: bool = False) -> Tokens:
    """One token."""
    return Tokens([logprob], [old], [advantage], [True], [0], [selected])


def same_policy(seed: int) -> Tokens:
    """Tokens whose log-probs are the old ones, so every ratio is 1."""
    tokens = random_tokens(seed)
    return attrs.evolve(tokens, logprobs=list(tokens.old), selected=[False] * len(tokens.old))


def sequence_mean_weights(tokens: Tokens) -> list[float]:
    return [1 / max(1, len(tokens.of(s))) for s in tokens.sequence]


def test_every_loss_is_in_the_catalogue() -> None:
    assert set(NAMES) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=SEEDS, options=OPTIONS)
def test_value_and_gradient_equal_the_reference(name: str, seed: int, options: LossSettings) -> None:
    tokens = random_tokens(seed)
    rng = random.Random(seed)
    weights = [rng.random() for _ in tokens.actions]
    found, gradient = run(name, tokens, options, weights)
    mask = torch.tensor(tokens.actions)
    wanted = torch.tensor(
        references.policy_loss(name, tokens, options, tokens.logprobs, tokens.logprobs), dtype=torch.float64
    )
    torch.testing.assert_close(torch.where(mask, found.loss_N, 0.0), wanted, rtol=1e-10, atol=1e-10)
    slope = torch.tensor(references.policy_loss_gradient(name, tokens, options, weights), dtype=torch.float64)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6)
    narrow, _ = run(name, tokens, options, weights, torch.float32)
    assert narrow.loss_N.dtype == torch.float32
    torch.testing.assert_close(torch.where(mask, narrow.loss_N.double(), 0.0), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ON_POLICY)
@EXAMPLES
@given(seed=SEEDS)
def test_a_ratio_of_one_gives_the_plain_policy_gradient(name: str, seed: int) -> None:
    tokens = same_policy(seed)
    loss, gradient = run(name, tokens)
    torch.testing.assert_close(gradient, -torch.tensor(tokens.advantages, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert not (loss.clipped_low_N | loss.clipped_high_N).any()


@pytest.mark.parametrize("name", ["sequence_ppo", "gspo", "gmpo"])
@EXAMPLES
@given(seed=SEEDS)
def test_a_sequence_ratio_of_one_gives_the_mean_advantage(name: str, seed: int) -> None:
    tokens = same_policy(seed)
    _, gradient = run(name, tokens, weights=sequence_mean_weights(tokens))
    for t, (action, sequence) in enumerate(zip(tokens.actions, tokens.sequence, strict=True)):
        mine = tokens.of(sequence)
        share = 1 if name == "sequence_ppo" else 1 / max(1, len(mine))
        wanted = -share * references.mean_of([tokens.advantages[i] for i in mine]) if action else 0.0
        assert float(gradient[t]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@EXAMPLES
@given(seed=SEEDS)
def test_gspo_token_has_gspos_value(seed: int) -> None:
    tokens = random_tokens(seed)
    torch.testing.assert_close(run("gspo_token", tokens)[0].loss_N, run("gspo", tokens)[0].loss_N)


@pytest.mark.parametrize("name", CLIPPED_BY_RATIO)
@pytest.mark.parametrize(
    ("rho", "advantage", "dual", "loss", "slope"),
    [
        (1.5, 1.0, None, -1.2, 0.0),
        (1.5, -1.0, None, 1.5, 1.5),
        (0.5, 1.0, None, -0.5, -0.5),
        (0.5, -1.0, None, 0.8, 0.0),
        (1.1, 2.0, None, -2.2, -2.2),
        (5.0, -1.0, 3.0, 3.0, 0.0),
        (2.0, -1.0, 3.0, 2.0, 2.0),
        (5.0, 1.0, 3.0, -1.2, 0.0),
    ],
)
def test_clipping_by_hand(
    name: str, rho: float, advantage: float, dual: float | None, loss: float, slope: float
) -> None:
    found, gradient = run(name, single(math.log(rho) - 3, -3.0, advantage), LossSettings(dual_clip=dual))
    assert float(found.loss_N) == pytest.approx(loss, rel=1e-9)
    assert float(gradient) == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert float(found.ratio_N) == pytest.approx(rho, rel=1e-9)
    dropped = dual is not None and rho > dual and advantage < 0
    assert bool(found.clipped_high_N) == (dropped or (rho > 1.2 and advantage > 0))
    assert bool(found.clipped_low_N) == (rho < 0.8 and advantage < 0)


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "slope"),
    [(math.e, 1.0, -math.exp(0.4), 0.0), (math.e, -1.0, math.e, math.e), (1 / math.e, -1.0, math.exp(-0.4), 0.0)],
)
def test_gmpo_clips_the_log_ratio(rho: float, advantage: float, loss: float, slope: float) -> None:
    options = LossSettings(clip_low=0.4, clip_high=0.4)
    found, gradient = run("gmpo", single(math.log(rho) - 3, -3.0, advantage), options)
    assert float(found.loss_N) == pytest.approx(loss, rel=1e-9)
    assert float(gradient) == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("rho", "weight"), [(10.0, 5.0), (0.01, 0.01), (2.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_the_gradient(rho: float, weight: float, advantage: float) -> None:
    options = LossSettings(clip_low=1.0, clip_high=4.0)
    found, gradient = run("cispo", single(math.log(rho) - 5, -5.0, advantage), options)
    assert float(gradient) == pytest.approx(-weight * advantage, rel=1e-9)
    assert bool(found.clipped_high_N) == (rho > 5)
    assert not bool(found.clipped_low_N)


def test_sapo_fades_with_the_distance_from_one() -> None:
    slopes = [float(run("sapo", single(math.log(rho) - 3, -3.0, 1.0))[1]) / -rho for rho in (1.0, 1.5, 2.0, 4.0)]
    assert slopes[0] == pytest.approx(1.0)
    assert slopes == sorted(slopes, reverse=True)
    assert slopes[1] == pytest.approx(4 * 0.622459331 * 0.377540669, rel=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vespo_weighs_a_sequence_by_all_of_its_tokens(advantage: float) -> None:
    """Two tokens, each of ratio 2: W = 4. The weight is largest at W = k / lambda."""
    both = Tokens([math.log(2) - 3] * 2, [-3.0] * 2, [advantage] * 2, [True] * 2, [0] * 2, [False] * 2)
    found, gradient = run("vespo", both)
    k, rate = (2, 3) if advantage > 0 else (3, 2)
    assert gradient.tolist() == pytest.approx([-advantage * 4**k * math.exp(-3 * rate)] * 2, rel=1e-9)
    assert found.ratio_N.tolist() == pytest.approx([4.0, 4.0])
    slopes = {
        w: float(run("vespo", single(math.log(w) - 3, -3.0, advantage))[1])
        for w in (0.9 * k / rate, k / rate, 1.1 * k / rate)
    }
    assert max(slopes.values(), key=abs) == slopes[k / rate]


@pytest.mark.parametrize(
    ("moved", "advantage", "weight"), [(1.0, 1.0, 1.0), (-3.0, 1.0, 1.0), (1.0, -1.0, 1.0), (-3.0, -1.0, math.exp(-6))]
)
def test_topr_tapers_what_was_bad_and_has_become_unlikely(moved: float, advantage: float, weight: float) -> None:
    """Two tokens that moved by as much each: the weight is that of both together."""
    both = Tokens([moved - 5] * 2, [-5.0] * 2, [advantage] * 2, [True] * 2, [0] * 2, [False] * 2)
    assert run("topr", both)[1].tolist() == pytest.approx([-advantage * weight] * 2, rel=1e-9)


def test_dro_is_pulled_back_from_both_sides() -> None:
    options = LossSettings(dro_beta=0.5)
    slopes = [float(run("dro", single(x - 3, -3.0, 1.0), options)[1]) for x in (-2.0, 0.0, 2.0, 4.0)]
    assert slopes == pytest.approx([-2.0, -1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "new", "advantage", "kept"),
    [
        ("dppo_tv", 0.70, 1.0, False),
        ("dppo_tv", 0.64, 1.0, True),
        ("dppo_tv", 0.70, -1.0, True),
        ("dppo_tv", 0.30, -1.0, False),
        ("dppo_tv", 0.36, -1.0, True),
        ("dppo_tv", 0.30, 1.0, True),
        ("dppo_kl", 0.90, 1.0, False),
        ("dppo_kl", 0.60, 1.0, True),
        ("dppo_kl", 0.90, -1.0, True),
        ("dppo_kl", 0.10, -1.0, False),
        ("dppo_kl", 0.40, -1.0, True),
        ("dppo_kl", 0.10, 1.0, True),
    ],
)
def test_dppo_holds_back_only_what_leads_further_out(name: str, new: float, advantage: float, kept: bool) -> None:
    bound = 0.15 if name == "dppo_tv" else 0.05
    options = LossSettings(clip_low=bound, clip_high=bound)
    found, gradient = run(name, single(math.log(new), math.log(0.5), advantage), options)
    assert float(gradient) == pytest.approx(-new / 0.5 * advantage if kept else 0.0, rel=1e-9)
    assert bool(found.clipped_high_N | found.clipped_low_N) == (not kept)


def test_selected_tokens_by_hand() -> None:
    tokens = single(math.log(1.1) - 3, -3.0, 2.0, selected=True)
    clipped, no_gradient = run("clip_cov", tokens)
    assert float(clipped.loss_N) == float(no_gradient) == 0.0
    penalised, gradient = run("kl_cov", tokens, LossSettings(cov_kl_coef=0.5))
    assert float(penalised.loss_N) == pytest.approx(-2.2 + 0.5 * math.log(1.1), rel=1e-9)
    assert float(gradient) == pytest.approx(-2.2 + 0.5, rel=1e-9)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_missing_selection_is_named(name: str) -> None:
    given_inputs = attrs.evolve(loss_inputs(single(-1.0, -1.0, 1.0), torch.tensor([-1.0])), selected_N=None)
    with pytest.raises(ValueError, match="selected_N"):
        POLICY_LOSSES[name](given_inputs, PolicyLossParams())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EXAMPLES
@given(seed=SEEDS, dual=st.sampled_from([None, 3.0]))
def test_extreme_log_ratios_stay_finite(name: str, dtype: torch.dtype, seed: int, dual: float | None) -> None:
    tokens, rng = random_tokens(seed), random.Random(seed)
    for t, action in enumerate(tokens.actions):
        if action:
            tokens.logprobs[t], tokens.old[t] = rng.choice(
                [(0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (0.0, 0.0), (-1e4, -0.1), (-0.1, -1e4), (1e4, 0.0), (0.0, 1e4)]
            )
            tokens.advantages[t] = rng.choice([1.0, -1.0, 0.0])
    loss, gradient = run(name, tokens, LossSettings(dual_clip=dual), dtype=dtype)
    mask = torch.tensor(tokens.actions)
    assert loss.loss_N[mask].isfinite().all()
    assert loss.ratio_N[mask].isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dro"])  # its square holds without an advantage
@EXAMPLES
@given(seed=SEEDS)
def test_no_advantage_no_gradient(name: str, seed: int) -> None:
    tokens = random_tokens(seed)
    still = attrs.evolve(tokens, advantages=[0.0] * len(tokens.old), selected=[False] * len(tokens.old))
    assert run(name, still)[1].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=SEEDS)
def test_sequences_do_not_mix(name: str, seed: int) -> None:
    tokens, options = random_tokens(seed), LossSettings(dual_clip=3.0)
    whole, gradient = run(name, tokens, options)
    for s in range(tokens.sequences):
        places = [t for t, mine in enumerate(tokens.sequence) if mine == s]
        alone = Tokens(
            logprobs=[tokens.logprobs[t] for t in places],
            old=[tokens.old[t] for t in places],
            advantages=[tokens.advantages[t] for t in places],
            actions=[tokens.actions[t] for t in places],
            sequence=[0] * len(places),
            selected=[tokens.selected[t] for t in places],
        )
        part, slope = run(name, alone, options)
        torch.testing.assert_close(part.loss_N, whole.loss_N[places], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(slope, gradient[places], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KL_KINDS)
@EXAMPLES
@given(seed=SEEDS)
def test_kl_value_and_gradient_equal_the_reference(kind: str, seed: int) -> None:
    tokens, rng = random_tokens(seed), random.Random(seed)
    base = [x + rng.gauss(0, 0.5) for x in tokens.logprobs]
    leaf = torch.tensor(tokens.logprobs, dtype=torch.float64, requires_grad=True)
    old = torch.tensor(tokens.old, dtype=torch.float64)
    found = kl_estimate(leaf, torch.tensor(base, dtype=torch.float64), kind, ratio(leaf, old))
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    for t, (logprob, reference, before) in enumerate(zip(tokens.logprobs, base, tokens.old, strict=True)):
        assert float(found.detach()[t]) == pytest.approx(
            references.kl_estimate(kind, logprob, reference, before), abs=1e-11
        )
        up, down = (references.kl_estimate(kind, logprob + h, reference, before) for h in (1e-6, -1e-6))
        assert float(gradient[t]) == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("x", [-60.0, -12.0, -3.0, 5.0, 12.0, 60.0])
def test_no_token_outweighs_all_others(kind: str, x: float) -> None:
    """At any distance from the reference a token's KL is at most 10, and its gradient at most that of k3 at 10."""
    leaf = torch.tensor([x], requires_grad=True)
    found = kl_estimate(leaf, torch.zeros(1), kind)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert abs(float(found.detach())) <= 10.0
    assert abs(float(gradient)) <= 13.0


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_weight_inside_a_trust_region_is_bounded(name: str) -> None:
    """From a probability of 1e-6 to 0.1 is inside the region of total variation, and was a gradient of 1e5."""
    old = torch.tensor([1e-6, 1e-6, 0.1, 0.1], dtype=torch.float64).log()
    leaf = torch.tensor([0.1, 2e-5, 0.11, 0.1], dtype=torch.float64).log().requires_grad_()
    loss = POLICY_LOSSES[name](
        PolicyLossInput(
            logprobs_N=leaf,
            old_logprobs_N=old,
            advantages_N=torch.ones(4, dtype=torch.float64),
            action_mask_N=torch.ones(4, dtype=torch.bool),
            sequence_N=torch.zeros(4, dtype=torch.int64),
            sequences=1,
        ),
        PolicyLossParams(eps_clip=0.15),
    )
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), leaf)
    torch.testing.assert_close(gradient, torch.tensor([-20.0, -20.0, -1.1, -1.0], dtype=torch.float64))
    assert float(loss.ratio_N[0].detach()) == pytest.approx(1e5), "what is logged is the ratio itself"


def test_unbiased_k3_is_the_exact_divergence_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference, sampler = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    p, q, mu = leaf.log_softmax(0), reference.log_softmax(0), sampler.log_softmax(0)
    estimated = (mu.exp() * kl_estimate(p, q, "k3_unbiased", ratio(p, mu))).sum()
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close(estimated, exact)
    (slope,) = torch.autograd.grad(estimated, leaf, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(exact, leaf)[0])


def test_the_absolute_log_ratio_has_the_gradient_of_twice_the_total_variation() -> None:
    logits, reference = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = logits.requires_grad_()
    p, q = leaf.log_softmax(0), reference.log_softmax(0)
    estimated = (p.detach().exp() * kl_estimate(p, q, "abs")).sum()
    (slope,) = torch.autograd.grad(estimated, leaf, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad((p.exp() - q.exp()).abs().sum(), leaf)[0])


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_of_extremes_is_finite(kind: str) -> None:
    leaf = torch.tensor([0.0, -1e4, -1e4, 1e4], requires_grad=True)
    other = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    found = kl_estimate(leaf, other, kind, ratio(leaf, other))
    assert found.isfinite().all()
    assert torch.autograd.grad(found.sum(), leaf)[0].isfinite().all()


def test_kl_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="ratio"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k3_unbiased")
    with pytest.raises(ValueError, match="k9"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")


@pytest.mark.parametrize("mode", MODES)
@EXAMPLES
@given(seed=SEEDS, max_length=st.integers(1, 50))
def test_aggregation_equals_the_reference(mode: str, seed: int, max_length: int) -> None:
    batch = random_batch(seed)
    actions = [a for s in batch for a in s.actions]
    groups, samples = torch.tensor([s.group for s in batch]), torch.tensor([s.sample for s in batch])
    found = loss_weights(
        mode,
        action_mask_N=torch.tensor(actions),
        lengths_S=torch.tensor([len(s.actions) for s in batch]),
        group_ids_S=groups,
        rollout_ids_S=rollout_ids(groups, samples),
        max_length=max_length,
    )
    wanted = torch.tensor(references.loss_weights(mode, batch, max_length))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    if mode not in ("constant_length", "sequence_sum", "token_sum"):
        assert float(found.sum()) == pytest.approx(1.0, rel=1e-5)
    losses = torch.where(torch.tensor(actions), 2.0, float("nan"))
    assert float(weighted_sum(losses, found, torch.tensor(actions))) == pytest.approx(2 * float(found.sum()), rel=1e-5)


def test_tokens_of_two_branches_are_told_apart() -> None:
    """They have the sample and the positions in common; which of them is chosen is not the order's to say."""
    turns, lengths = torch.arange(40).repeat_interleave(30), torch.full((40,), 30)
    keys = token_keys(torch.full((40,), 7), lengths, torch.arange(30).repeat(40), turns)
    assert len(keys.unique()) == len(keys)
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, len(keys), generator=generator)
    mask, options = torch.ones(len(keys), dtype=torch.bool), {"share": 0.1, "limits": (-10.0, 10.0)}
    order = torch.randperm(len(keys), generator=generator)
    chosen = clip_cov_tokens(logprobs, advantages, mask, keys_N=keys, **options)
    moved = clip_cov_tokens(logprobs[order], advantages[order], mask, keys_N=keys[order], **options)
    assert torch.equal(moved, chosen[order])
    assert int(chosen.view(40, 30).any(0).sum()) > 20, "chosen alike in no two branches"


def selectable(seed: int) -> list[list[Tensor]]:
    """Log-probs, advantages, masks and keys of the sequences of a step."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (6,), generator=generator)
    total = int(lengths.sum())
    logprobs, advantages = torch.randn(2, total, generator=generator)
    mask = torch.rand(total, generator=generator) < 0.8
    mask[0] = True
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    keys = token_keys(torch.arange(6) * 3 + 1, lengths, positions, torch.zeros(total, dtype=torch.int64))
    sizes = lengths.tolist()
    return [list(torch.split(column, sizes)) for column in (logprobs, advantages, mask, keys)]


@EXAMPLES
@given(seed=SEEDS, share=st.sampled_from([0.0, 0.02, 0.3, 1.0]), low=st.sampled_from([-0.5, 0.0, 0.3]))
def test_selection_is_the_share_and_ignores_order(seed: int, share: float, low: float) -> None:
    columns = selectable(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    logprobs, advantages, mask, keys = (torch.cat(column) for column in columns)
    moved = [torch.cat([column[i] for i in order]) for column in columns]
    places = torch.split(torch.arange(len(mask)), [len(x) for x in columns[0]])
    place = torch.cat([places[i] for i in order])
    wanted = max(1, int(share * int(mask.sum())))
    limits = (low, 2.0)
    poisoned = torch.where(mask, logprobs, float("nan")), torch.where(mask, advantages, float("inf"))

    clip = clip_cov_tokens(logprobs, advantages, mask, share=share, limits=limits, keys_N=keys)
    found = clip_cov_tokens(*moved[:3], share=share, limits=limits, keys_N=moved[3])
    assert torch.equal(found, clip[place])
    assert torch.equal(clip, clip_cov_tokens(*poisoned, mask, share=share, limits=limits, keys_N=keys))
    covariance = covariances(logprobs, advantages, mask)
    eligible = mask & (covariance > low) & (covariance < 2.0)
    assert int(clip.sum()) == min(wanted, int(eligible.sum()))
    assert not (clip & ~eligible).any()

    kl = kl_cov_tokens(logprobs, advantages, mask, share=share, keys_N=keys)
    assert torch.equal(kl_cov_tokens(*moved[:3], share=share, keys_N=moved[3]), kl[place])
    assert torch.equal(kl, kl_cov_tokens(*poisoned, mask, share=share, keys_N=keys))
    assert int(kl.sum()) == wanted
    assert not (kl & ~mask).any()
    if (mask & ~kl).any():
        assert covariance[kl].min() >= covariance[mask & ~kl].max()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_of_tokens_that_covary_alike_the_same_are_penalised_in_any_order(share: float) -> None:
    """Good replies to one prompt often begin with the same token: its log-prob and advantage are equal in all."""
    logprobs, advantages = torch.tensor([-1.0, -2.0]).repeat(8), torch.tensor([1.0, -1.0]).repeat(8)
    mask, keys = torch.ones(16, dtype=torch.bool), torch.arange(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    chosen = kl_cov_tokens(logprobs, advantages, mask, share=share, keys_N=keys)
    moved = kl_cov_tokens(logprobs[order], advantages[order], mask, share=share, keys_N=keys[order])
    assert torch.equal(moved, chosen[order])


def test_covariances_by_hand() -> None:
    logprobs, advantages = torch.tensor([-1.0, -3.0, -5.0, 9.0]), torch.tensor([3.0, 0.0, 0.0, 9.0])
    assert covariances(logprobs, advantages, torch.tensor([True, True, True, False])).tolist() == [4.0, 0.0, 2.0, 0.0]
    assert not covariances(logprobs, advantages, torch.tensor([True, False, False, False])).any(), "of one token"


def test_nothing_is_selected_without_actions() -> None:
    nothing, zeros = torch.zeros(3, dtype=torch.bool), torch.zeros(3)
    keys = torch.arange(3)
    assert not kl_cov_tokens(zeros, zeros, nothing, share=0.5, keys_N=keys).any()
    assert not clip_cov_tokens(zeros, zeros, nothing, share=0.5, limits=(-1.0, 1.0), keys_N=keys).any()


def test_clip_cov_takes_tokens_evenly() -> None:
    turns = torch.zeros(200 * 50, dtype=torch.int64)
    keys = token_keys(torch.arange(200), torch.full((200,), 50), torch.arange(50).repeat(200), turns)
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, 10_000, generator=generator)
    everywhere = torch.ones(10_000, dtype=torch.bool)
    limits = (-math.inf, math.inf)
    chosen = clip_cov_tokens(logprobs, advantages, everywhere, share=0.1, limits=limits, keys_N=keys)
    assert int(chosen.sum()) == 1000
    by_position = chosen.view(200, 50).sum(0)
    by_sequence = chosen.view(200, 50).sum(1)
    assert int(by_position.min()) > 0
    assert int(by_sequence.max()) < 25
