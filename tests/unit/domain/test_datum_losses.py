"""Losses of datums against loops over plain numbers, by value and by gradient; datums end to end."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from rollgrad.domain.algorithms.losses.datums import CONSTANTS, DATUM_LOSSES, DatumObjective
from rollgrad.domain.batches.datums import Datum, DatumBatch, of_datums, pack_datums
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.ports.models import TokenScores


def datum(length: int, rng: random.Random) -> Datum:
    def numbers(low: float, high: float) -> torch.Tensor:
        return torch.tensor([rng.uniform(low, high) for _ in range(length)])

    return Datum(
        tokens_T=torch.tensor([rng.randrange(50) for _ in range(length)]),
        targets_T=torch.tensor([rng.randrange(50) for _ in range(length)]),
        weights_T=numbers(-1.0, 2.0),
        sampled_logprobs_T=numbers(-4.0, -0.1),
        advantages_T=numbers(-2.0, 2.0),
    )


@pytest.fixture
def datums() -> list[Datum]:
    rng = random.Random(5)
    return [datum(length, rng) for length in (1, 4, 7)]


@pytest.fixture
def batch(datums: list[Datum]) -> DatumBatch:
    return pack_datums(datums)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


TERMS: dict[str, Callable[[float, float, float], tuple[float, float]]] = {
    # log p, log q and A: the loss of a token and its derivative by log p, from the documents of the API
    "cross_entropy": lambda p, q, a: (-p, -1.0),
    "importance_sampling": lambda p, q, a: (-math.exp(p - q) * a, -math.exp(p - q) * a),
    "ppo": lambda p, q, a: (
        -min(math.exp(p - q) * a, clip(math.exp(p - q), 0.7, 1.5) * a),
        -math.exp(p - q) * a if math.exp(p - q) * a <= clip(math.exp(p - q), 0.7, 1.5) * a else 0.0,
    ),
    "cispo": lambda p, q, a: (-clip(math.exp(p - q), 0.7, 1.5) * a * p, -clip(math.exp(p - q), 0.7, 1.5) * a),
    "dro": lambda p, q, a: (-(p * a - 0.15 * (p - q) ** 2), -(a - 0.3 * (p - q))),
}
CHOSEN = {"ppo": (0.7, 1.5), "cispo": (0.7, 1.5), "dro": (0.3,)}


@pytest.mark.parametrize("loss", DATUM_LOSSES)
def test_the_loss_is_the_sum_of_the_documents_terms(loss: str, datums: list[Datum], batch: DatumBatch) -> None:
    rng = random.Random(7)
    logprobs_N = torch.tensor([rng.uniform(-4.0, -0.1) for _ in range(batch.token_count)])
    logprobs_N = torch.where(batch.action_mask_N, logprobs_N, 0.0).requires_grad_()
    constants = dict(zip(CONSTANTS[loss], CHOSEN.get(loss, ()), strict=True))
    output = DatumObjective(loss=loss, constants=constants)(
        TokenScores(logprobs_N=logprobs_N, entropy_N=torch.zeros_like(logprobs_N)), batch
    )
    total, gradient = 0.0, []
    for each, logprobs_T in zip(datums, of_datums(logprobs_N.detach(), batch), strict=True):
        columns = (logprobs_T, each.sampled_logprobs_T, each.advantages_T, each.weights_T)
        gradient.append(0.0)  # the first token of a sequence is not predicted
        for p, q, a, w in zip(*(column.tolist() for column in columns), strict=True):
            value, slope = TERMS[loss](p, q, a)
            total += w * value
            gradient.append(w * slope)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(total, rel=1e-5)
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-6)


def test_columns_stand_where_their_tokens_are_predicted(datums: list[Datum], batch: DatumBatch) -> None:
    assert batch.lengths_S.tolist() == [2, 5, 8]
    for columns, name in (
        (of_datums(batch.predicted_N, batch), "targets_T"),
        (of_datums(batch.filled("loss_weights_N"), batch), "weights_T"),
        (of_datums(batch.advantages_N, batch), "advantages_T"),
        (of_datums(batch.sampled_logprobs_N, batch), "sampled_logprobs_T"),
    ):
        assert all(torch.equal(found, getattr(each, name)) for found, each in zip(columns, datums, strict=True)), name
    read = [tokens[:-1] for tokens in batch.tokens_N.split(batch.lengths_S.tolist())]
    assert all(torch.equal(found, each.tokens_T) for found, each in zip(read, datums, strict=True))


def test_a_part_of_a_batch_has_the_same_datums(batch: DatumBatch) -> None:
    part = batch.select([2, 0])
    whole = of_datums(batch.predicted_N, batch)
    assert [found.tolist() for found in of_datums(part.predicted_N, part)] == [whole[2].tolist(), whole[0].tolist()]


def test_what_datums_begin_with_alike_is_computed_once() -> None:
    rng = random.Random(3)
    whole = datum(9, rng)
    other = evolve(whole, tokens_T=torch.cat([whole.tokens_T[:6], torch.tensor([60, 61, 62])]))
    batch = pack_datums([whole, datum(4, rng), other])
    assert shared_prefixes(batch).distinct(batch.lengths_S.tolist()) == 10 + 5 + (10 - 6)


def test_nothing_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="at least one datum"):
        pack_datums([])


@pytest.mark.parametrize(
    ("loss", "ratio", "wanted"),
    [("ppo", 1.25, -1.2), ("ppo", 0.7, -0.7), ("cispo", 0.01, 0.01), ("cispo", 4.5, 4.0)],
)
def test_bounds_that_a_client_leaves_out_are_those_of_the_documents(loss: str, ratio: float, wanted: float) -> None:
    """With an advantage of 1, and for cispo, whose loss is the bounded ratio times -log p, a log-prob of -1."""
    one = torch.ones(1)
    batch = pack_datums(
        [
            Datum(
                tokens_T=one.long(),
                targets_T=one.long(),
                weights_T=one,
                sampled_logprobs_T=-one - math.log(ratio),
                advantages_T=one,
            )
        ]
    )
    constants = {name: value for name, value in CONSTANTS[loss].items() if value is not None}
    scores = TokenScores(logprobs_N=torch.tensor([0.0, -1.0]), entropy_N=torch.zeros(2))
    found = DatumObjective(loss=loss, constants=constants)(scores, batch).loss
    assert float(found) == pytest.approx(wanted)
