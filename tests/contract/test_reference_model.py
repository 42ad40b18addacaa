"""Promises of every reference model."""

from pathlib import Path

import pytest
import torch

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import PredictingModel, ReferenceModel
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import FakeReference


@pytest.fixture(params=["fake", "torch"])
def reference(request: pytest.FixtureRequest, tiny_model_dir: Path) -> ReferenceModel:
    if request.param == "fake":
        return FakeReference()
    model = load_causal_lm(
        str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--ref.model_name_or_path"
    )
    return TorchReference(model)


@pytest.fixture
def batch() -> PackedBatch:
    return pack([make_trajectory([5, 6, 7], [20 + i] * (i + 1), [9], [30], group_id=0) for i in range(4)])


def test_scores_are_of_action_tokens_without_gradient(reference: ReferenceModel, batch: PackedBatch) -> None:
    assert isinstance(reference, ReferenceModel)
    scores = reference.score(batch)
    for column in (scores.logprobs_N, scores.entropy_N):
        assert column.dtype == torch.float32
        assert column.shape == batch.tokens_N.shape
        assert not column.requires_grad
        assert not column[~batch.action_mask_N].any()
    assert (scores.logprobs_N[batch.action_mask_N] < 0).all()


def test_scores_never_change_and_do_not_depend_on_company(reference: ReferenceModel, batch: PackedBatch) -> None:
    whole = reference.score(batch).logprobs_N
    assert torch.equal(reference.score(batch).logprobs_N, whole)
    alone = torch.cat([reference.score(batch.select([index])).logprobs_N for index in range(len(batch))])
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-5)


def test_predictions_are_the_most_likely_tokens_and_the_rest(reference: ReferenceModel, batch: PackedBatch) -> None:
    assert isinstance(reference, PredictingModel)
    found, logprobs_A = reference.predict(batch, 3), reference.score(batch).logprobs_N[batch.action_mask_N]
    assert (found.ids_AK.dtype, found.logprobs_AB.dtype) == (torch.int32, torch.float32)
    assert found.ids_AK.shape == (len(logprobs_A), 3)
    assert not found.logprobs_AB.requires_grad
    torch.testing.assert_close(found.logprobs_AB.exp().sum(1), torch.ones(len(logprobs_A)), rtol=1e-4, atol=1e-5)
    assert (found.logprobs_AB[:, :2] >= found.logprobs_AB[:, 1:3]).all()
    assert (logprobs_A <= found.logprobs_AB[:, 0] + 1e-5).all()
    torch.testing.assert_close(logprobs_A[0], _asked(reference, batch, int(batch.tokens_N[batch.action_mask_N][0])))


def _asked(reference: PredictingModel, batch: PackedBatch, token: int) -> torch.Tensor:
    """Returns the log-prob of a token in the place of the first action token; all are predicted."""
    found = reference.predict(batch, 100_000)
    (place,) = (found.ids_AK[0] == token).nonzero()[:, 0]
    return found.logprobs_AB[0, place]
