"""Promises of every critic."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.rewards.trained_reward import TorchReward
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import LossOutput, ValueModel
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import FakeValue

FLAG = "--critic.model_name_or_path"
OBJECTIVE = ClippedValueObjective(clip=None)


@pytest.fixture(params=["fake", "torch", "reward"])
def make(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Callable[[], ValueModel]:
    def torch_value() -> ValueModel:
        model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
        tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
        kind = TorchReward if request.param == "reward" else TorchValue
        return kind(model, tokenizer, OptimizerSettings(lr=1e-2, total_steps=30))

    return FakeValue if request.param == "fake" else torch_value


@pytest.fixture
def batch() -> PackedBatch:
    packed = pack([make_trajectory([5, 6, 10 + i], [20 + i] * (i + 1), [9], [30], group_id=i) for i in range(4)])
    mask = packed.action_mask_N
    return evolve(
        packed,
        values_N=torch.zeros(packed.token_count),
        returns_N=torch.where(mask, packed.sequence_ids_N - 1.5, 0.0),
        value_weights_N=torch.where(mask, 1.0 / mask.sum(), 0.0),
    )


def test_values_are_of_action_tokens_without_gradient(make: Callable[[], ValueModel], batch: PackedBatch) -> None:
    critic = make()
    assert isinstance(critic, ValueModel)
    critic.update([batch], OBJECTIVE)
    values_N = critic.values(batch)
    assert values_N.dtype == torch.float32
    assert values_N.shape == batch.tokens_N.shape
    assert not values_N.requires_grad
    assert not values_N[~batch.action_mask_N].any()
    assert values_N[batch.action_mask_N].any()


def test_updates_learn_the_returns(make: Callable[[], ValueModel], batch: PackedBatch) -> None:
    critic = make()
    losses = [critic.update([batch], OBJECTIVE)["value_loss"] for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_any_split_is_the_same_step(make: Callable[[], ValueModel], batch: PackedBatch) -> None:
    whole, divided = make(), make()
    for _ in range(2):
        expected = whole.update([batch], OBJECTIVE)
        found = divided.update([batch.select([3, 0]), batch.select([1, 2])], OBJECTIVE)
    assert found == pytest.approx(expected, rel=1e-3)
    torch.testing.assert_close(divided.values(batch), whole.values(batch), rtol=1e-2, atol=1e-3)


def test_a_loss_that_is_not_finite_changes_nothing(make: Callable[[], ValueModel], batch: PackedBatch) -> None:
    critic = make()
    critic.update([batch], OBJECTIVE)
    before = critic.values(batch)

    def breaks(values_N: Tensor, part: PackedBatch) -> LossOutput:
        return LossOutput(loss=OBJECTIVE(values_N, part).loss * math.nan)

    with pytest.raises(NonFiniteUpdateError):
        critic.update([batch], breaks)
    assert torch.equal(critic.values(batch), before)


def test_state_continues_as_if_never_stopped(make: Callable[[], ValueModel], batch: PackedBatch) -> None:
    critic = make()
    critic.update([batch], OBJECTIVE)
    state = copy.deepcopy(critic.state_dict())
    critic.update([batch], OBJECTIVE)
    restored = make()
    restored.load_state_dict(state)
    restored.update([batch], OBJECTIVE)
    assert torch.equal(restored.values(batch), critic.values(batch))


def test_saving_makes_the_directory(make: Callable[[], ValueModel], tmp_path: Path) -> None:
    make().save(tmp_path / "deep" / "critic")
    assert any((tmp_path / "deep" / "critic").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        make().save(tmp_path / "file" / "critic")
