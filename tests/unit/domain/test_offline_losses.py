"""Losses of labelled replies, reward models, process reward models and distillation against formulas in plain
Python."""

import math
import random
import statistics
from collections.abc import Mapping
from operator import eq, mul

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.distillation import DistillationObjective, divergence, with_rest
from rollgrad.domain.algorithms.losses.process_reward import StepObjective, step_loss
from rollgrad.domain.algorithms.losses.reward_model import RewardObjective, last_trained, pairwise_reward_loss
from rollgrad.domain.algorithms.losses.unpaired import UnpairedObjective, reference_point, unpaired_loss
from rollgrad.domain.batches.examples import ExampleBatch, StepBatch, pack_sequences, pack_steps
from rollgrad.domain.batches.metrics import joined
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.sharding import weightless
from rollgrad.domain.episodes.examples import StepLabels, WeightedTokens
from rollgrad.domain.ports.models import TokenScores
from tests.unit.domain.test_preference import batch_of, log_sigmoid, logistic, random_pairs, reply, sums

EXAMPLES = settings(max_examples=15, deadline=None)
SEEDS = st.integers(0, 10**6)
ROWS = st.lists(st.floats(-6, 6), min_size=3, max_size=6)


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@EXAMPLES
@given(r=st.floats(-50, 50), beta=st.floats(0.01, 1), kl=st.floats(-5, 5), desirable=st.booleans())
def test_kto_is_the_formula(r: float, beta: float, kl: float, desirable: bool) -> None:
    z = max(0.0, kl)
    wanted = 1 - logistic(beta * (r - z)) if desirable else 1 - logistic(beta * (z - r))
    label = torch.tensor([desirable])
    assert float(unpaired_loss("kto", float64([r]), label, beta=beta, kl=kl)) == pytest.approx(wanted, abs=1e-12)
    wanted = 1 - logistic(beta * r) if desirable else logistic(beta * r)
    found = unpaired_loss("apo_zero_unpaired", float64([r]), label, beta=beta, kl=kl)
    assert float(found) == pytest.approx(wanted, abs=1e-12)


def test_the_reference_point_is_a_mean_of_at_least_0_over_two_replies_or_more() -> None:
    assert reference_point(float64([1.0, 4.0])) == 2.5
    assert reference_point(float64([1.0, -4.0])) == 0.0
    with pytest.raises(ValueError, match="at least two"):
        reference_point(float64([1.0]))
    with pytest.raises(ValueError, match="kto or apo_zero_unpaired"):
        unpaired_loss("sigmoid", float64([1.0]), torch.tensor([True]), beta=0.1, kl=0.0)


def labelled(seed: int) -> tuple[PackedBatch, Tensor]:
    """(replies with random labels, weights of a step and a reference, log-probs of a policy)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    replies = [reply(rng, [1, 2]) for _ in range(rng.randint(2, 6))]
    batch = pack_sequences(replies, group_ids=range(len(replies)), sample_ids=[0] * len(replies))
    noise = -torch.rand(2, batch.token_count, generator=generator, dtype=torch.float64)
    return evolve(
        batch,
        scores_S=torch.tensor([float(rng.random() < 0.5) for _ in replies]),
        loss_weights_N=torch.where(batch.action_mask_N, 1.0 / len(replies), 0.0).double(),
        ref_logprobs_N=noise[0],
    ), noise[1]


@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 4))
def test_any_split_of_labelled_replies_gives_the_same_loss_gradient_and_metrics(seed: int, parts: int) -> None:
    batch, theta_N = labelled(seed)
    objective = UnpairedObjective(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, kl=0.2)

    def output(piece: ExampleBatch, logprobs_N: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor | float]]:
        leaf = logprobs_N.clone().requires_grad_()
        found = objective(TokenScores(logprobs_N=leaf, entropy_N=leaf), piece)
        (gradient_N,) = torch.autograd.grad(found.loss, leaf)
        return found.loss.detach(), gradient_N, found.metrics

    loss, whole_N, found = output(batch, theta_N)
    metrics = joined([found])
    assert batch.ref_logprobs_N is not None
    ratio_N = torch.where(batch.action_mask_N, theta_N - batch.ref_logprobs_N, 0.0)
    wanted, right = 0.0, 0
    rewards: dict[bool, list[float]] = {True: [], False: []}
    logprobs: dict[bool, list[float]] = {True: [], False: []}
    own_N = torch.where(batch.action_mask_N, theta_N, 0.0)
    lengths = batch.lengths_S.tolist()
    for own, score in zip(own_N.split(lengths), batch.scores_S.tolist(), strict=True):
        logprobs[bool(score)].append(float(own.sum()))
    for part, score in zip(ratio_N.split(lengths), batch.scores_S.tolist(), strict=True):
        x = 0.3 * (float(part.sum()) - 0.2)
        wanted += 1.3 * (1 - logistic(x)) if score else 0.7 * (1 - logistic(-x))
        right += (x > 0) == bool(score)
        rewards[bool(score)].append(0.3 * float(part.sum()))
    assert float(loss) == pytest.approx(wanted / len(batch))
    assert metrics == pytest.approx(
        {
            "accuracy": right / len(batch),
            "kl": 0.2,
            "desirable_share": len(rewards[True]) / len(batch),
            "undesirable_share": len(rewards[False]) / len(batch),
            "desirable_reward": statistics.mean(rewards[True] or [0.0]),
            "undesirable_reward": statistics.mean(rewards[False] or [0.0]),
            "desirable_logprob": statistics.mean(logprobs[True] or [0.0]),
            "undesirable_logprob": statistics.mean(logprobs[False] or [0.0]),
            "entropy": float(theta_N[batch.action_mask_N].mean()),  # which stands for it here
        }
    )
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    summed_N, of_parts = torch.zeros_like(whole_N), []
    for part in order.tensor_split(min(parts, len(batch))):
        index = batch.token_index(part)
        _, gradient_N, of_part = output(batch.select(part), theta_N[index])
        summed_N[index] += gradient_N
        of_parts.append(of_part)
    torch.testing.assert_close(summed_N, whole_N, rtol=1e-12, atol=1e-15)
    assert joined(of_parts) == pytest.approx(metrics, rel=1e-9)


@EXAMPLES
@given(c=st.floats(-30, 30), r=st.floats(-30, 30), m=st.floats(0, 3), centring=st.floats(0, 0.1))
def test_the_reward_loss_is_the_formula(c: float, r: float, m: float, centring: float) -> None:
    wanted = -log_sigmoid(c - r - m) + centring * (c + r) ** 2
    found = pairwise_reward_loss(float64([c]), float64([r]), margins_P=float64([m]), centring=centring)
    assert float(found) == pytest.approx(wanted, rel=1e-9)


def test_the_reward_loss_is_finite_for_any_gap() -> None:
    leaf = torch.tensor([-1e4], requires_grad=True)
    loss = pairwise_reward_loss(leaf, torch.tensor([1e4]))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(2e4)
    assert leaf.grad is not None
    assert float(leaf.grad) == -1.0


@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 4))
def test_any_split_of_solutions_trains_the_process_reward_model_alike(seed: int, parts: int) -> None:
    rng = random.Random(seed)
    solutions = []
    for row in range(rng.randint(1, 6)):
        ends = sorted(rng.sample(range(1, 12), rng.randint(1, 4)))
        labels = [rng.choice([0.0, 0.3, 1.0]) for _ in ends]
        tokens_T = torch.tensor([rng.randint(1, 99) for _ in range(12)])
        solutions.append(
            StepLabels(token_ids_T=tokens_T, ends=ends, labels=labels, row=row, weight=rng.choice([0.5, 1.0, 2.0]))
        )
    batch = pack_steps(solutions)
    odds_N = torch.randn(batch.token_count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    nothing_N = torch.zeros_like(odds_N)

    def output(piece: StepBatch, piece_N: Tensor) -> tuple[float, Tensor, dict[str, float]]:
        leaf = piece_N.clone().requires_grad_()
        scores = TokenScores(logprobs_N=nothing_N, entropy_N=nothing_N, odds_N=leaf)
        found = StepObjective()(scores, piece)
        (gradient_N,) = torch.autograd.grad(found.loss, leaf)
        return float(found.loss.detach()), gradient_N, joined([found.metrics])

    loss, whole_N, metrics = output(batch, odds_N)
    steps = [
        (s, label, float(odds_N[12 * s + end]), solution.weight)
        for s, solution in enumerate(solutions)
        for end, label in zip(solution.ends, solution.labels, strict=True)
    ]
    total = math.fsum(weight for *_, weight in steps)
    wanted = sum(-w / total * (p * log_sigmoid(x) + (1 - p) * log_sigmoid(-x)) for _, p, x, w in steps)
    assert loss == pytest.approx(wanted, rel=1e-6)
    right = sum(w / total for _, p, x, w in steps if (x > 0) == (p > 0.5))
    assert metrics["step_accuracy"] == pytest.approx(right, abs=1e-6)
    hits = sum(x <= 0 and p <= 0.5 for _, p, x, _ in steps)
    claims, errors = sum(x <= 0 for *_, x, _ in steps), sum(p <= 0.5 for _, p, *_ in steps)
    assert metrics["error_f1"] == pytest.approx(2 * hits / (claims + errors) if claims + errors else 0.0)
    first = [
        [next((i for i, step in enumerate(steps) if step[0] == s and wrong(step)), None) for s in range(len(solutions))]
        for wrong in (lambda step: step[1] <= 0.5, lambda step: step[2] <= 0)
    ]
    assert metrics["first_error_accuracy"] == pytest.approx(sum(map(eq, *first)) / len(solutions))
    summed_N, of_parts = torch.zeros_like(whole_N), []
    for part in torch.randperm(len(solutions)).tensor_split(min(parts, len(solutions))):
        index = batch.token_index(part)
        _, gradient_N, of_part = output(batch.select(part), odds_N[index])
        summed_N[index] += gradient_N
        of_parts.append(of_part)
    torch.testing.assert_close(summed_N, whole_N, rtol=1e-12, atol=1e-15)
    assert joined(of_parts) == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 4))
def test_any_split_of_pairs_trains_the_reward_model_alike(seed: int, parts: int) -> None:
    pairs = random_pairs(seed)
    batch, values_N = batch_of(pairs, seed)
    margins_P = torch.rand(len(pairs), generator=torch.Generator().manual_seed(seed))
    batch = evolve(batch, scores_S=margins_P.repeat_interleave(2))
    objective = RewardObjective(centring=0.01)

    def output(piece: PackedBatch, rewards_N: Tensor) -> tuple[float, Tensor, dict[str, float]]:
        leaf = rewards_N.clone().requires_grad_()
        found = objective(leaf, piece)
        (gradient_N,) = torch.autograd.grad(found.loss, leaf)
        return float(found.loss.detach()), gradient_N, joined([found.metrics])

    loss, whole_N, metrics = output(batch, values_N)
    scores = values_N[last_trained(batch)].tolist()
    assert metrics["score_mean"] == pytest.approx(statistics.mean(scores), abs=1e-6)
    assert metrics["score_std"] == pytest.approx(statistics.stdev(scores), abs=1e-6)
    last = [int(index) for index in last_trained(batch)]
    assert last == [
        int(part.nonzero()[-1, 0]) + start
        for part, start in zip(
            batch.action_mask_N.split(batch.lengths_S.tolist()), batch.starts_S.tolist(), strict=True
        )
    ]
    total = math.fsum(pair.weight for pair in pairs)
    wanted = sum(
        pair.weight / total * (-log_sigmoid(c - r - float(m)) + 0.01 * (c + r) ** 2)
        for pair, c, r, m in zip(
            pairs, values_N[last[::2]].tolist(), values_N[last[1::2]].tolist(), margins_P, strict=True
        )
    )
    assert loss == pytest.approx(wanted, rel=1e-6)
    weights, chosen, rejected = [pair.weight / total for pair in pairs], scores[::2], scores[1::2]
    columns = {
        "accuracy": [c > r for c, r in zip(chosen, rejected, strict=True)],
        "reward_gap": [c - r for c, r in zip(chosen, rejected, strict=True)],
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    for name, values in columns.items():
        assert metrics[name] == pytest.approx(math.fsum(map(mul, weights, values)), abs=1e-6), name
    bins: dict[int, float] = {}  # of confidences from 0.5 to 1: by how much they are above the share of right choices
    for weight, gap in zip(weights, columns["reward_gap"], strict=True):
        sure = logistic(abs(gap))
        number = min(9, int((sure - 0.5) * 20))
        bins[number] = bins.get(number, 0.0) + weight * (sure - (gap > 0))
    assert metrics["calibration_error"] == pytest.approx(math.fsum(map(abs, bins.values())), abs=1e-6)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pairs), generator=generator)
    summed_N, of_parts = torch.zeros_like(whole_N), []
    for part in order.tensor_split(min(parts, len(pairs))):
        sequences = torch.isin(batch.group_ids_S, part).nonzero()[:, 0]
        sequences = sequences[torch.randperm(len(sequences), generator=generator)]  # between the replies of other pairs
        index = batch.token_index(sequences)
        _, gradient_N, of_part = output(batch.select(sequences), values_N[index])
        summed_N[index] += gradient_N
        of_parts.append(of_part)
    copy = weightless(batch.select([0, 1]))  # of a process that has no pair
    of_parts.append(output(copy, values_N[batch.token_index(torch.arange(2))])[2])
    torch.testing.assert_close(summed_N, whole_N, rtol=1e-12, atol=1e-15)
    assert joined(of_parts) == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    assert len(sums(batch, values_N)) == len(pairs)


@EXAMPLES
@given(plus=st.floats(-5, 5), minus=st.floats(-5, 5), label=st.floats(0, 1))
def test_step_losses_are_the_formula(plus: float, minus: float, label: float) -> None:
    right = logistic(plus - minus)
    wanted = -label * math.log(right) - (1 - label) * math.log(1 - right)
    assert float(step_loss(float64([plus - minus]), float64([label]))) == pytest.approx(wanted, rel=1e-9)


def test_steps_of_even_odds_count_as_wrong_and_those_that_weigh_nothing_not_at_all() -> None:
    """Whichever of the metrics is asked: the first solution's steps are found (right, wrong, wrong)."""
    right, error = [1.0, 0.5, 1.0], [0.0, 1.0, 0.0]
    labels = [
        StepLabels(token_ids_T=torch.arange(4), ends=[1, 2, 3], labels=each, row=row, weight=weight)
        for row, (each, weight) in enumerate([(right, 1.0), (error, 0.0), (error, 0.0)])
    ]
    odds_N = float64([0.0, 3.0, 0.0, -1.0, 0.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1.0, -1.0])
    found = StepObjective()(TokenScores(logprobs_N=odds_N, entropy_N=odds_N, odds_N=odds_N), pack_steps(labels))
    assert joined([found.metrics]) == pytest.approx(
        {"step_accuracy": 2 / 3, "error_f1": 2 * 1 / (2 + 1), "first_error_accuracy": 1.0}
    )
    with pytest.raises(ValueError, match="two reward tokens"):
        StepObjective()(TokenScores(logprobs_N=odds_N, entropy_N=odds_N), pack_steps(labels))


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@EXAMPLES
@given(rows=st.integers(3, 6).flatmap(lambda n: st.tuples(*[st.lists(st.floats(-6, 6), min_size=n, max_size=n)] * 2)))
def test_divergences_are_the_formula(beta: float, rows: tuple[list[float], list[float]]) -> None:
    teacher, student = (float64(row).log_softmax(0) for row in rows)
    t, s = teacher.exp().tolist(), student.exp().tolist()
    m = [beta * a + (1 - beta) * b for a, b in zip(t, s, strict=True)]
    wanted = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
    whole = float(divergence(teacher[None], student[None], beta=beta))
    assert whole == pytest.approx(wanted, abs=1e-9)
    coarse = float(divergence(with_rest(teacher[None, :2]), with_rest(student[None, :2]), beta=beta))
    assert -1e-9 <= coarse <= whole + 1e-6
    others = [torch.stack([*row[:2], row[2:].logsumexp(0)])[None] for row in (teacher, student)]
    assert coarse == pytest.approx(float(divergence(*others, beta=beta)), abs=1e-5)


def test_tokens_that_rounding_leaves_nothing_besides_have_a_rest() -> None:
    certain = torch.tensor([[1.0, 2**-23]]).log()  # rounding may leave less than nothing
    assert float(with_rest(certain)[0, 2].exp()) == pytest.approx(1e-7, rel=1e-5)


def test_distillation_weighs_both_losses_of_trained_tokens() -> None:
    row = WeightedTokens(token_ids_T=torch.tensor([1, 2, 3]), weights_T=torch.tensor([0.0, 1.0, 2.0]), prompt_length=1)
    scores = TokenScores(
        logprobs_N=float64([math.nan, -2.0, -0.5]),
        entropy_N=torch.zeros(3),
        divergence_N=float64([math.nan, 0.3, 0.7]),
    )
    batch = pack_sequences([row], group_ids=[0], sample_ids=[0])
    output = DistillationObjective(weight=0.25, temperature=2.0)(scores, batch)
    assert float(output.loss) == pytest.approx(0.75 * (2.0 + 2 * 0.5) + 0.25 * 2.0**2 * (0.3 + 2 * 0.7), rel=1e-9)
    assert float(output.metrics["divergence"]) == pytest.approx(0.3 + 2 * 0.7, rel=1e-9)
    with pytest.raises(ValueError, match="without a teacher"):
        DistillationObjective()(evolve(scores, divergence_N=None), batch)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_model_is_no_divergence_from_itself(beta: float) -> None:
    logprobs = torch.randn(4, 50).log_softmax(1).requires_grad_()
    for row in (logprobs, with_rest(logprobs[:, :5])):
        loss = divergence(row.detach(), row, beta=beta).sum()
        assert abs(float(loss.detach())) < 1e-6


def test_beta_must_lie_between_both_ends() -> None:
    with pytest.raises(ValueError, match="from 0"):
        divergence(torch.zeros(1, 1), torch.zeros(1, 1), beta=1.5)
