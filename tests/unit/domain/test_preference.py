"""Losses of preference pairs against formulas in plain Python, whatever the split."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.catalogue import IMITATION, PAIR_LOSSES
from rollgrad.domain.algorithms.losses.preference import FUNCTIONS, Pairs, PreferenceObjective
from rollgrad.domain.algorithms.preference_settings import FDivergence, PreferenceSettings
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.ports.models import TokenScores

EXAMPLES = settings(max_examples=5, deadline=None)
SEEDS = st.integers(0, 10**6)
BETA, SMOOTHING, GAMMA, TAU = 0.3, 0.1, 0.7, 0.05


def objective_of(*losses: str, weights: tuple[float, ...] | None = None, ld_alpha: float = 1.0) -> PreferenceObjective:
    return PreferenceObjective(
        settings=PreferenceSettings(
            loss=losses,
            loss_weights=weights,
            beta=BETA,
            label_smoothing=SMOOTHING,
            simpo_gamma=GAMMA,
            discopop_tau=TAU,
            ld_alpha=ld_alpha,
        )
    )


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(x: float) -> float:
    return -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x)


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def exo(q: float) -> float:
    return q * math.log(q / (1 - SMOOTHING)) + (1 - q) * math.log((1 - q) / SMOOTHING)


def disco(x: float) -> float:
    m = logistic(x / TAU)
    return (1 - m) * -log_sigmoid(x) + m * math.exp(-x)


Oracle = Callable[[float, float, float, float, int, int], float]
"""(policy's log-prob of the chosen and rejected reply, the reference's, their lengths) -> loss."""

ORACLES: dict[str, Oracle] = {
    "sigmoid": lambda c, r, fc, fr, n, m: smoothed(BETA * (c - r - (fc - fr))),
    "robust": lambda c, r, fc, fr, n, m: (
        (-(1 - SMOOTHING) * log_sigmoid(BETA * (c - r - fc + fr)) + SMOOTHING * log_sigmoid(-BETA * (c - r - fc + fr)))
        / (1 - 2 * SMOOTHING)
    ),
    "ipo": lambda c, r, fc, fr, n, m: ((c - fc) / n - (r - fr) / m - 1 / (2 * BETA)) ** 2,
    "ipo_sum": lambda c, r, fc, fr, n, m: (c - fc - r + fr - 1 / (2 * BETA)) ** 2,
    "hinge": lambda c, r, fc, fr, n, m: max(0.0, 1 - BETA * (c - fc - r + fr)),
    "sigmoid_norm": lambda c, r, fc, fr, n, m: smoothed(BETA * ((c - fc) / n - (r - fr) / m)),
    "simpo": lambda c, r, fc, fr, n, m: smoothed(BETA * (c / n - r / m) - GAMMA),
    "cpo": lambda c, r, fc, fr, n, m: smoothed(BETA * (c - r)),
    "orpo": lambda c, r, fc, fr, n, m: -c / n - BETA * log_sigmoid(log_odds(c / n) - log_odds(r / m)),
    "apo_zero": lambda c, r, fc, fr, n, m: 1 - logistic(BETA * (c - fc)) + logistic(BETA * (r - fr)),
    "apo_down": lambda c, r, fc, fr, n, m: logistic(BETA * (c - fc)) + 1 - logistic(BETA * (c - fc - r + fr)),
    "nca_pair": lambda c, r, fc, fr, n, m: (
        -log_sigmoid(BETA * (c - fc)) - log_sigmoid(-BETA * (c - fc)) / 2 - log_sigmoid(-BETA * (r - fr)) / 2
    ),
    "bco_pair": lambda c, r, fc, fr, n, m: -log_sigmoid(BETA * (c - fc)) - log_sigmoid(-BETA * (r - fr)),
    "exo_pair": lambda c, r, fc, fr, n, m: exo(logistic(BETA * (c - fc - r + fr))),
    "sppo_hard": lambda c, r, fc, fr, n, m: (c - fc - 0.5 / BETA) ** 2 + (r - fr + 0.5 / BETA) ** 2,
    "discopop": lambda c, r, fc, fr, n, m: disco(BETA * (c - fc - r + fr)),
}


RANKED = {"aot", "aot_unpaired"}
"""Losses that compare pairs with each other, in `test_transport`."""


def reply(rng: random.Random, prompt: list[int]) -> WeightedTokens:
    """Random tokens after `prompt`, some of which are not trained."""
    length = rng.randint(1, 5)
    weights = [0.0] * len(prompt) + [rng.choice([0.0, 1.0]) for _ in range(length)] + [1.0]
    tokens = prompt + [rng.randint(1, 99) for _ in range(length + 1)]
    return WeightedTokens(token_ids_T=torch.tensor(tokens), weights_T=torch.tensor(weights), prompt_length=len(prompt))


def random_pairs(seed: int) -> list[Preference]:
    rng = random.Random(seed)
    result = []
    for row in range(rng.randint(1, 6)):
        prompt = [rng.randint(1, 99) for _ in range(rng.randint(1, 4))]
        chosen, rejected = reply(rng, [*prompt, 100]), reply(rng, [*prompt, 101])
        result.append(Preference(chosen=chosen, rejected=rejected, row=row, weight=rng.choice([0.5, 1.0, 2.0])))
    return result


def batch_of(pairs: list[Preference], seed: int) -> tuple[PackedBatch, Tensor]:
    """(the pairs' batch with a random reference, random log-probs of a policy), in float64."""
    batch, generator = pack_preferences(pairs), torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        values_N = -torch.rand(batch.token_count, generator=generator, dtype=torch.float64) - 0.1
        return torch.where(batch.action_mask_N, values_N, 0.0)

    return evolve(batch, ref_logprobs_N=noise()), noise()


def output(
    objective: PreferenceObjective, theta_N: Tensor, batch: PackedBatch, **columns: Tensor
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, its gradient at the log-probs, metrics)."""
    leaf = theta_N.clone().requires_grad_()
    scores = TokenScores(**{"logprobs_N": leaf, "entropy_N": torch.zeros_like(leaf), **columns})
    found = objective(scores, batch)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    return float(found.loss.detach()), gradient, {name: float(value) for name, value in found.metrics.items()}


def sums(batch: PackedBatch, values_N: Tensor) -> list[tuple[float, float]]:
    """Returns the sums over trained tokens of the chosen and of the rejected reply of each pair."""
    flat = [
        math.fsum(v for v, trained in zip(values, mask, strict=True) if trained)
        for values, mask in zip(
            [part.tolist() for part in values_N.split(batch.lengths_S.tolist())],
            [part.tolist() for part in batch.action_mask_N.split(batch.lengths_S.tolist())],
            strict=True,
        )
    ]
    return list(zip(flat[::2], flat[1::2], strict=True))


def test_every_loss_has_an_oracle_and_an_entry() -> None:
    assert ORACLES.keys() | RANKED == FUNCTIONS.keys() == PAIR_LOSSES.keys()


@pytest.mark.parametrize("name", ORACLES)
@EXAMPLES
@given(seed=SEEDS)
def test_losses_are_the_formula(name: str, seed: int) -> None:
    pairs = random_pairs(seed)
    batch, theta_N = batch_of(pairs, seed)
    assert batch.ref_logprobs_N is not None
    if not PAIR_LOSSES[name].reference:
        batch = evolve(batch, ref_logprobs_N=None)
        reference = [(0.0, 0.0)] * len(pairs)
    else:
        reference = sums(batch, batch.ref_logprobs_N)
    total = math.fsum(pair.weight for pair in pairs)
    wanted = math.fsum(
        pair.weight / total * ORACLES[name](c, r, fc, fr, pair.chosen.trained_length, pair.rejected.trained_length)
        for pair, (c, r), (fc, fr) in zip(pairs, sums(batch, theta_N), reference, strict=True)
    )
    loss, _, metrics = output(objective_of(name), theta_N, batch)
    assert loss == pytest.approx(wanted, rel=1e-6)  # weights are float32
    assert metrics[f"{name}_loss"] == pytest.approx(loss)


@pytest.mark.parametrize("name", [*ORACLES, IMITATION])
@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 5))
def test_any_split_in_any_order_gives_the_same_gradient_and_metrics(name: str, seed: int, parts: int) -> None:
    pairs = random_pairs(seed)
    batch, theta_N = batch_of(pairs, seed)
    objective = objective_of(*dict.fromkeys([name, "robust"]), ld_alpha=0.5)
    _, whole, metrics = output(objective, theta_N, batch)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    summed, added = torch.zeros_like(whole), dict.fromkeys(metrics, 0.0)
    for part in order.tensor_split(min(parts, len(pairs))):
        sequences = torch.isin(batch.group_ids_S, part).nonzero()[:, 0].flip(0)  # the rejected reply first
        piece, index = batch.select(sequences), batch.token_index(sequences)
        _, gradient, of_part = output(objective, theta_N[index], piece)
        summed[index] += gradient
        added = {name: added[name] + value for name, value in of_part.items()}
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-15)
    assert added == pytest.approx(metrics, rel=1e-9)
    assert bool((whole[~batch.action_mask_N] == 0).all())


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({"sigmoid": 1.0}, math.log(2)),
        ({"robust": 1.0}, math.log(2)),
        ({"sigmoid_norm": 1.0}, math.log(2)),
        ({"hinge": 1.0}, 1.0),
        ({"apo_zero": 1.0}, 1.0),
        ({"apo_down": 1.0}, 1.0),
        ({"sigmoid": 0.8, "bco_pair": 0.2}, 0.8 * math.log(2) + 0.2 * 2 * math.log(2)),
    ],
)
def test_a_policy_that_is_its_reference_has_the_known_loss(losses: dict[str, float], wanted: float) -> None:
    batch, _ = batch_of(random_pairs(3), 3)
    assert batch.ref_logprobs_N is not None
    loss, _, metrics = output(objective_of(*losses, weights=tuple(losses.values())), batch.ref_logprobs_N, batch)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert (metrics["reward_margin"], metrics["accuracy"], metrics["chosen_fell_share"]) == (0.0, 0.0, 0.0)


def test_metrics_by_hand() -> None:
    one, two = (
        WeightedTokens(token_ids_T=torch.tensor(tokens), weights_T=torch.tensor([0.0, 1, 1]), prompt_length=1)
        for tokens in ([1, 2, 3], [1, 4, 5])
    )
    pairs = [Preference(chosen=one, rejected=two, row=0), Preference(chosen=two, rejected=one, row=1)]
    batch = evolve(pack_preferences(pairs), ref_logprobs_N=torch.tensor([0, -1, -1] * 4).double())
    theta_N = torch.tensor([0, -0.5, -0.5, 0, -1, -2, 0, -2, -1, 0, -1, -0.5]).double()
    entropy_N, correct_N = torch.arange(12).double(), torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0])
    objective = PreferenceObjective(settings=PreferenceSettings(loss=("sigmoid", "sft")))
    _, _, metrics = output(objective, theta_N, batch, entropy_N=entropy_N, correct_N=correct_N)
    assert metrics.pop("sigmoid_loss") == pytest.approx((math.log1p(math.exp(-0.2)) + math.log1p(math.exp(0.15))) / 2)
    assert metrics == pytest.approx(
        {
            "chosen_nll": (1 + 3) / 4,
            "chosen_reward": 0.1 * (1 - 1) / 2,
            "rejected_reward": 0.1 * (-1 + 0.5) / 2,
            "reward_margin": 0.1 * (2 - 1.5) / 2,
            "accuracy": 0.5,
            "chosen_logprob": -2.0,
            "rejected_logprob": -2.25,
            "chosen_fell_share": 0.5,
            "entropy": (1 + 2 + 4 + 5 + 7 + 8 + 10 + 11) / 8,
            "chosen_token_accuracy": 3 / 4,
        }
    )


@pytest.mark.parametrize(("name", "rewards"), [("cpo", (-3.0, -2.0)), ("simpo", (-1.0, -2.0))])
def test_rewards_without_a_reference_are_what_the_loss_compares(name: str, rewards: tuple[float, float]) -> None:
    """The longer reply is the likelier one by its mean alone."""
    chosen, rejected = (
        WeightedTokens(token_ids_T=torch.arange(n + 1), weights_T=torch.tensor([0.0] + [1.0] * n), prompt_length=1)
        for n in (3, 1)
    )
    batch = pack_preferences([Preference(chosen=chosen, rejected=rejected, row=0)])
    theta_N = torch.tensor([0, -1, -1, -1, 0, -2], dtype=torch.float64)
    _, _, metrics = output(objective_of(name), theta_N, batch)
    assert (metrics["chosen_reward"], metrics["rejected_reward"]) == pytest.approx([BETA * each for each in rewards])
    assert metrics["accuracy"] == float(rewards[0] > rewards[1])


def test_ld_dpo_weighs_the_tokens_beyond_the_shorter_reply() -> None:
    chosen = WeightedTokens(token_ids_T=torch.arange(5), weights_T=torch.tensor([0.0, 1, 0, 1, 1]), prompt_length=1)
    rejected = WeightedTokens(token_ids_T=torch.tensor([0, 9]), weights_T=torch.tensor([0.0, 1]), prompt_length=1)
    batch = pack_preferences([Preference(chosen=chosen, rejected=rejected, row=0)])
    batch = evolve(batch, ref_logprobs_N=torch.zeros(7))
    theta_N = torch.tensor([0, -1, 0, -10, -100, 0, -1000], dtype=torch.float64)
    _, _, metrics = output(PreferenceObjective(settings=PreferenceSettings(ld_alpha=0.5)), theta_N, batch)
    assert (metrics["chosen_logprob"], metrics["rejected_logprob"]) == (-56.0, -1000.0)


@EXAMPLES
@given(seed=SEEDS)
def test_wpo_weighs_pairs_by_what_the_policy_would_write(seed: int) -> None:
    """e^(mean of log pi - log sum_v pi_v^2) of both replies, without a gradient."""
    pairs = random_pairs(seed)
    batch, theta_N = batch_of(pairs, seed)
    collision_N = torch.rand(batch.token_count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    settings = PreferenceSettings(loss=("sigmoid", "hinge"), beta=BETA, wpo=True)
    loss, gradient, metrics = output(PreferenceObjective(settings=settings), theta_N, batch, collision_N=collision_N)
    factors = [
        math.exp(c / pair.chosen.trained_length) * math.exp(r / pair.rejected.trained_length)
        for pair, (c, r) in zip(pairs, sums(batch, theta_N + collision_N), strict=True)
    ]
    total = math.fsum(pair.weight for pair in pairs)
    assert metrics["wpo_weight"] == pytest.approx(
        math.fsum(pair.weight / total * factor for pair, factor in zip(pairs, factors, strict=True)), rel=1e-6
    )
    weighed = pack_preferences(
        [evolve(pair, weight=pair.weight / total * factor) for pair, factor in zip(pairs, factors, strict=True)]
    )
    scale = math.fsum(pair.weight / total * factor for pair, factor in zip(pairs, factors, strict=True))
    plain = PreferenceObjective(settings=evolve(settings, wpo=False))
    wanted, slope, _ = output(plain, theta_N, evolve(weighed, ref_logprobs_N=batch.ref_logprobs_N))
    assert loss == pytest.approx(scale * wanted, rel=1e-5)
    torch.testing.assert_close(gradient, scale * slope, rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="collision_N"):
        output(PreferenceObjective(settings=settings), theta_N, batch)


@pytest.mark.parametrize(
    ("divergence", "slope"),
    [
        (FDivergence.REVERSE_KL, math.log),
        (FDivergence.FORWARD_KL, lambda u: -1 / u),
        (FDivergence.JS, lambda u: math.log(2 * u / (1 + u))),
        (FDivergence.ALPHA, lambda u: (1 - u**-0.3) / 0.3),
    ],
)
def test_the_gap_is_of_the_divergence_that_is_chosen(divergence: FDivergence, slope: Callable[[float], float]) -> None:
    ratios = torch.tensor([[0.7, -1.2], [-0.4, 2.5]], dtype=torch.float64)
    pairs = Pairs(
        logprobs_P2=ratios - 3,
        ref_logprobs_P2=torch.full((2, 2), -3.0, dtype=torch.float64),
        lengths_P2=torch.ones(2, 2),
        divergence=divergence,
        alpha=0.3,
    )
    expected = [slope(math.exp(chosen)) - slope(math.exp(rejected)) for chosen, rejected in ratios.tolist()]
    assert pairs.log_ratio_gap_P.tolist() == pytest.approx(expected)
    far = (ratios.float() * -1000).requires_grad_()
    gap = evolve(pairs, logprobs_P2=far - 3, ref_logprobs_P2=torch.tensor(-3.0)).log_ratio_gap_P
    gap.sum().backward()
    assert far.grad is not None
    assert bool(torch.isfinite(gap).all() & torch.isfinite(far.grad).all())


def test_a_loss_with_a_reference_says_that_there_is_none() -> None:
    batch, theta_N = batch_of(random_pairs(0), 0)
    with pytest.raises(ValueError, match="no ref_logprobs_N"):
        output(objective_of("sigmoid"), theta_N, evolve(batch, ref_logprobs_N=None))


def test_pairs_of_a_step_must_weigh_something() -> None:
    pairs = [evolve(pair, weight=0.0) for pair in random_pairs(0)]
    with pytest.raises(ValueError, match="weight 0"):
        pack_preferences(pairs)


def test_orpo_is_finite_where_a_reply_is_certain() -> None:
    batch, theta_N = batch_of(random_pairs(1), 1)
    loss, gradient, _ = output(objective_of("orpo"), torch.zeros_like(theta_N).float(), batch)
    assert math.isfinite(loss)
    assert bool(torch.isfinite(gradient).all())
