"""Demonstrations as batches: weights of a step, branches as units, the same gradient however a step is divided."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.algorithms.losses.supervised import SupervisedObjective
from rollgrad.domain.batches.examples import DemonstrationBatch, pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration, WeightedTokens
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.models import TokenScores
from tests.shards import shards

VOCABULARY = 11


def tokens(token_ids: list[int], weights: list[float]) -> WeightedTokens:
    return WeightedTokens(token_ids_T=torch.tensor(token_ids), weights_T=torch.tensor(weights), prompt_length=1)


def test_weights_are_shares_of_the_step() -> None:
    batch = pack_demonstrations(
        [
            Demonstration(branches=(tokens([1, 2, 3], [0, 1, 1]), tokens([1, 4], [0, 0.5])), row=0),
            Demonstration(branches=(tokens([5, 6], [0, 1]),), row=1, weight=2.0),
        ]
    )
    assert isinstance(batch, DemonstrationBatch)
    total = 1 + 1 + 0.5 + 2
    assert batch.filled("loss_weights_N").tolist() == pytest.approx(
        [0, 1 / total, 1 / total, 0, 0.5 / total, 0, 2 / total]
    )
    assert batch.unit_ids_S.tolist() == [0, 0, 1]
    assert batch.sample_ids_S.tolist() == [0, 1, 0]
    assert batch.action_mask_N.tolist() == [False, True, True, False, True, False, True]
    with pytest.raises(DataError, match="or of held-out data, have the weight 0"):
        pack_demonstrations([Demonstration(branches=(tokens([1, 2], [0, 1]),), row=0, weight=0.0)])


def test_long_and_short_demonstrations_weigh_the_same_in_a_mean_over_sequences() -> None:
    batch = pack_demonstrations(
        [
            Demonstration(branches=(tokens([1, 2, 3], [0, 1, 1]), tokens([1, 4], [0, 0.5])), row=0),
            Demonstration(branches=(tokens([5, 6], [0, 1]),), row=1, weight=2.0),
        ],
        sequence_mean=True,
    )
    assert batch.filled("loss_weights_N").tolist() == pytest.approx(
        [0, 1 / 2.5 / 3, 1 / 2.5 / 3, 0, 0.5 / 2.5 / 3, 0, 2 / 3]
    )


def gradient(parts: list[DemonstrationBatch], loss: str, logits_VV: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of the parts and its gradient, of a model that predicts each token from the one before."""
    logits_VV = logits_VV.clone().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        before_N = torch.cat([torch.zeros(1, dtype=torch.int64), part.tokens_N[:-1]])
        logprobs_N = logits_VV.log_softmax(-1)[before_N, part.tokens_N]
        scores = TokenScores(logprobs_N=torch.where(part.action_mask_N, logprobs_N, 0.0), entropy_N=torch.zeros(1))
        total = total + SupervisedObjective(loss=loss)(scores, part).loss
    total.backward()  # type: ignore[no-untyped-call]
    assert logits_VV.grad is not None
    return total.detach(), logits_VV.grad


sequences = st.lists(
    st.tuples(st.integers(0, VOCABULARY - 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=5
)

demonstrated = st.tuples(st.lists(sequences, min_size=1, max_size=3), st.sampled_from([0.5, 1.0]))
"""Branches, and the weight of the row."""


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(demonstrated, min_size=1, max_size=5),
    budget=st.integers(1, 20),
    processes=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
    loss=st.sampled_from(["nll", "dft"]),
    sequence_mean=st.booleans(),
)
def test_any_split_order_or_division_gives_the_same_gradient(  # type: ignore[no-untyped-def]
    rows, budget, processes, order, loss, sequence_mean
) -> None:
    demonstrations = [
        Demonstration(
            # the last token is trained, so that something is
            branches=tuple(tokens([7, *(t for t, _ in s), 8], [0, *(w for _, w in s), 1]) for s in branches),
            row=place,
            weight=weight,
        )
        for place, (branches, weight) in enumerate(rows)
    ]
    logits_VV = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, expected = gradient([pack_demonstrations(demonstrations, sequence_mean=sequence_mean)], loss, logits_VV)
    # the oracle, written out
    own = [sum(float(w) for b in d.branches for w in b.weights_T) if sequence_mean else 1.0 for d in demonstrations]
    weights = [
        d.weight * float(w) / of
        for d, of in zip(demonstrations, own, strict=True)
        for b in d.branches
        for w in b.weights_T
    ]
    logprobs = logits_VV.log_softmax(-1)
    token_losses = []
    for demonstration, of in zip(demonstrations, own, strict=True):
        for branch in demonstration.branches:
            ids = branch.token_ids_T.tolist()
            for place, weight in enumerate(branch.weights_T.tolist()):
                if weight:
                    logprob = float(logprobs[ids[place - 1], ids[place]])
                    scale = 1.0 if loss == "nll" else float(torch.tensor(logprob).double().exp())
                    token_losses.append(demonstration.weight * weight / of * -scale * logprob)
    assert float(whole) == pytest.approx(sum(token_losses) / sum(weights), rel=1e-5)
    order.shuffle(demonstrations)
    batch = pack_demonstrations(demonstrations, sequence_mean=sequence_mean)
    parts = [piece for part in shards(batch, processes).parts for piece in split(part, budget)]
    divided, found = gradient(parts, loss, logits_VV)
    torch.testing.assert_close(divided, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
