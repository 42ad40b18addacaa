"""Checks of predictions that the processes of a model make together."""

import torch

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.ports.models import PredictingModel

TOP_K = 5


def assert_predicts(model: PredictingModel, lone: PredictingModel, batch: PackedBatch, tolerance: float = 1e-4) -> None:
    """Checks that a model predicts what a `lone` process does, of action tokens alone and of a batch in passes."""
    found, wanted = model.predict(batch, TOP_K), lone.predict(batch, TOP_K)
    assert found.ids_AK.dtype == torch.int32
    assert found.ids_AK.shape == wanted.ids_AK.shape == (int(batch.action_mask_N.sum()), TOP_K)
    torch.testing.assert_close(found.logprobs_AB, wanted.logprobs_AB, rtol=tolerance, atol=tolerance)
    # Tokens that are as likely as each other may change places.
    order = wanted.logprobs_AB[:, :-1].sort(1, descending=True).values
    apart_A = (order[:, :-1] - order[:, 1:]).amin(1) > 2 * tolerance
    last_A = wanted.logprobs_AB[:, TOP_K - 1] - found.logprobs_AB[:, TOP_K - 1]
    same_A = (found.ids_AK == wanted.ids_AK).all(1)
    assert bool((same_A | ~apart_A | (last_A.abs() > 0)).all()) or tolerance > 1e-3
    passes = Passes(batch, [[[index]] for index in reversed(range(len(batch)))])
    placed = model.predictions(passes, TOP_K)
    torch.testing.assert_close(placed.logprobs_AB[batch.action_mask_N], found.logprobs_AB, rtol=1e-3, atol=tolerance)
    assert placed.ids_AK.shape == (batch.token_count, TOP_K)
    assert not placed.ids_AK[~batch.action_mask_N].any()
    assert not placed.logprobs_AB[~batch.action_mask_N].any()
