"""Supervised losses against formulas written out, whatever the split."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.supervised import (
    SUPERVISED_LOSSES,
    SupervisedObjective,
    smoothed_nll,
    supervised_loss,
)
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.ports.models import TokenScores
from tests.unit.domain.test_losses import EXAMPLES, SEEDS, batch_of


def oracle(name: str, logits: list[float], target: int) -> tuple[float, list[float]]:
    """(loss, its gradient at the logits), from the papers: the gradient of SFT is p - onehot, and DFT's is p_target
    times that."""
    total = math.fsum(math.exp(x) for x in logits)
    p = [math.exp(x) / total for x in logits]
    weight = {"nll": 1.0, "dft": p[target]}[name]
    return -weight * math.log(p[target]), [weight * (q - (v == target)) for v, q in enumerate(p)]


@pytest.mark.parametrize("name", SUPERVISED_LOSSES)
@EXAMPLES
@given(logits=st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_losses_and_gradients_are_the_formula(name: str, logits: list[float]) -> None:
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    loss = supervised_loss(name, leaf.log_softmax(0)[1])
    loss.backward()
    wanted, gradient = oracle(name, logits, 1)
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-12)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(gradient, abs=1e-12)


@EXAMPLES
@given(logits=st.lists(st.floats(-5, 5), min_size=2, max_size=6), smoothing=st.floats(0, 0.9))
def test_smoothing_is_the_cross_entropy_of_torch(logits: list[float], smoothing: float) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    logprobs = row.log_softmax(0)
    wanted = torch.nn.functional.cross_entropy(row[None], torch.tensor([1]), label_smoothing=smoothing)
    torch.testing.assert_close(smoothed_nll(logprobs[1], logprobs.mean(), smoothing), wanted)


def test_bits_per_byte_are_those_of_the_trained_text() -> None:
    """The context, and what weighs nothing, is left out; the end token costs bits, and writes nothing."""
    row = WeightedTokens(
        token_ids_T=torch.tensor([5, 2, 3, 1, 4]), weights_T=torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0]), prompt_length=1
    )
    batch = pack_sequences([row], group_ids=[0], sample_ids=[0])
    bytes_V = torch.tensor([0, 0, 3, 4, 100, 100], dtype=torch.int16)
    logprobs_N = torch.tensor([-9.0, -1.0, -2.0, -0.5, -9.0])
    scores = TokenScores(logprobs_N=logprobs_N, entropy_N=torch.zeros(5))
    found = SupervisedObjective(bytes_V=bytes_V)(scores, batch).metrics["bits_per_byte"]
    assert found == pytest.approx(3.5 / math.log(2) / 7)


@pytest.mark.parametrize(("name", "smoothing"), [("nll", 0.0), ("dft", 0.0), ("nll", 0.3)])
@EXAMPLES
@given(seed=SEEDS)
def test_the_objective_and_its_metrics_are_sums_over_trained_tokens(name: str, smoothing: float, seed: int) -> None:
    batch, generator = batch_of(seed, "sequence_mean"), torch.Generator().manual_seed(seed)
    noise = torch.rand(4, batch.token_count, generator=generator, dtype=torch.float64)
    logprobs_N, mean_N, entropy_N, correct_N = -noise[0], -1 - noise[1], noise[2], (noise[3] < 0.5).double()
    scores = TokenScores(logprobs_N=logprobs_N, mean_logprobs_N=mean_N, entropy_N=entropy_N, correct_N=correct_N)
    found = SupervisedObjective(loss=name, label_smoothing=smoothing)(scores, batch)
    trained = batch.action_mask_N.nonzero()[:, 0].tolist()
    weights, p = batch.filled("loss_weights_N").tolist(), logprobs_N.exp().tolist()

    def total(value: Callable[[int], float]) -> float:
        return math.fsum(weights[t] * value(t) for t in trained)

    wanted = total(
        lambda t: (
            -p[t] * math.log(p[t])
            if name == "dft"
            else -(1 - smoothing) * math.log(p[t]) - smoothing * float(mean_N[t])
        )
    )
    assert float(found.loss) == pytest.approx(wanted, rel=1e-9)
    assert {name: float(value) for name, value in found.metrics.items()} == pytest.approx(
        {
            "nll": total(lambda t: -math.log(p[t])),
            "entropy": total(lambda t: float(entropy_N[t])),
            "accuracy": total(lambda t: float(correct_N[t])),
        },
        rel=1e-9,
    )


def gradient(batch: PackedBatch, theta_N: Tensor, objective: SupervisedObjective) -> Tensor:
    leaf = theta_N.clone().requires_grad_()
    loss = objective(TokenScores(logprobs_N=leaf, entropy_N=torch.zeros_like(leaf)), batch).loss
    (found,) = torch.autograd.grad(loss, leaf)
    return found


@pytest.mark.parametrize("name", SUPERVISED_LOSSES)
@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 5))
def test_any_split_gives_the_same_gradient_and_metrics(name: str, seed: int, parts: int) -> None:
    batch, objective = batch_of(seed, "token_mean"), SupervisedObjective(loss=name)
    assert batch.rollout_logprobs_N is not None
    theta_N = -batch.rollout_logprobs_N.abs()
    whole = gradient(batch, theta_N, objective)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    summed, nll = torch.zeros_like(whole), 0.0
    for part in order.tensor_split(min(parts, len(batch))):
        piece, index = batch.select(part), batch.token_index(part)
        summed[index] += gradient(piece, theta_N[index], objective)
        scores = TokenScores(logprobs_N=theta_N[index], entropy_N=theta_N[index])
        nll += float(objective(scores, piece).metrics["nll"])
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-15)
    assert batch.loss_weights_N is not None
    assert nll == pytest.approx(float(-(theta_N * batch.loss_weights_N).sum()), rel=1e-9)


def test_an_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="nll or dft"):
        supervised_loss("mse", torch.zeros(1))
