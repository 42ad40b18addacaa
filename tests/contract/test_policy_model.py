"""Promises of every policy model."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import LossOutput, PolicyModel, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import FakePolicy

FLAG = "--actor.model_name_or_path"


@pytest.fixture(params=["fake", "torch", "lora"])
def make(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Callable[[], PolicyModel]:
    def torch_policy() -> PolicyModel:
        model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
        if request.param == "lora":
            add_lora(model, LoraConfig(rank=4), seed=0)
        tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
        return TorchPolicy(model, tokenizer, OptimizerSettings(lr=1e-2, total_steps=10))

    return FakePolicy if request.param == "fake" else torch_policy


@pytest.fixture
def batch() -> PackedBatch:
    packed = pack([make_trajectory([5, 6, 7], [20 + i] * (i + 1), [9], [30], group_id=0) for i in range(4)])
    return evolve(packed, loss_weights_N=torch.where(packed.action_mask_N, 0.1, 0.0))


def likelihood(scores: TokenScores, batch: PackedBatch) -> LossOutput:
    loss = -(batch.loss_weights_N * scores.logprobs_N).sum()
    return LossOutput(loss=loss, metrics={"likelihood": -loss.detach(), "sequences": float(len(batch))})


def parts(batch: PackedBatch, *indices: list[int]) -> list[PackedBatch]:
    return [batch.select(part) for part in indices]


def weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def test_scores_are_of_action_tokens_without_gradient(make: Callable[[], PolicyModel], batch: PackedBatch) -> None:
    policy = make()
    assert isinstance(policy, PolicyModel)
    scores = policy.score(batch)
    for column in (scores.logprobs_N, scores.entropy_N):
        assert column.dtype == torch.float32
        assert column.shape == batch.tokens_N.shape
        assert not column.requires_grad
        assert not column[~batch.action_mask_N].any()
    assert (scores.logprobs_N[batch.action_mask_N] < 0).all()
    assert (scores.entropy_N[batch.action_mask_N] > 0).all()


def test_an_update_moves_towards_its_objective(make: Callable[[], PolicyModel], batch: PackedBatch) -> None:
    policy = make()
    before = policy.score(batch).logprobs_N.sum()
    metrics = policy.update([batch], likelihood)
    assert policy.score(batch).logprobs_N.sum() > before
    assert metrics.keys() == {"loss", "likelihood", "sequences", "grad_norm", "lr"}
    assert all(math.isfinite(value) for value in metrics.values())


def test_any_split_is_the_same_step(make: Callable[[], PolicyModel], batch: PackedBatch) -> None:
    whole, divided = make(), make()
    expected = whole.update([batch], likelihood)
    found = divided.update(parts(batch, [3], [0, 2], [1]), likelihood)
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(divided.score(batch).logprobs_N, whole.score(batch).logprobs_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(
    make: Callable[[], PolicyModel], batch: PackedBatch, poison: float
) -> None:
    policy = make()
    before = weights(policy)
    calls: list[int] = []

    def breaks(scores: TokenScores, part: PackedBatch) -> LossOutput:
        calls.append(1)
        return LossOutput(loss=likelihood(scores, part).loss * (poison if len(calls) == 2 else 1.0))

    with pytest.raises(NonFiniteUpdateError):
        policy.update(parts(batch, [0, 1], [2, 3]), breaks)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())


def test_state_continues_as_if_never_stopped(make: Callable[[], PolicyModel], batch: PackedBatch) -> None:
    policy = make()
    policy.update([batch], likelihood)
    state = copy.deepcopy(policy.state_dict())
    policy.update([batch], likelihood)
    restored = make()
    restored.load_state_dict(state)
    restored.update([batch], likelihood)
    assert all(torch.equal(weights(policy)[name], tensor) for name, tensor in restored.weights())


def test_saving_makes_the_directory(make: Callable[[], PolicyModel], tmp_path: Path) -> None:
    make().save(tmp_path / "deep" / "model")
    assert any((tmp_path / "deep" / "model").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        make().save(tmp_path / "file" / "model")


def test_every_weight_comes_once(make: Callable[[], PolicyModel]) -> None:
    pairs: list[Any] = list(make().weights())
    assert len({name for name, _ in pairs}) == len(pairs) == len({tensor.data_ptr() for _, tensor in pairs})
    assert not any(tensor.requires_grad for _, tensor in pairs)


def test_steps_are_counted_when_they_begin(make: Callable[[], PolicyModel], batch: PackedBatch) -> None:
    policy = make()
    assert policy.steps == 0
    policy.score(batch)
    assert policy.steps == 0
    policy.update([batch], likelihood)

    def fail(scores: TokenScores, batch: PackedBatch) -> LossOutput:
        assert policy.steps == 2, "whoever sends weights must not take half an update for the whole"
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        policy.update([batch], fail)
    assert policy.steps == 2
