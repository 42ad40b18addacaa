"""Promises of every checkpoint store."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore, TrainingState
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.testing.checkpoint_store import FakeCheckpointStore


class SavingPolicy:
    """Writes its weights, a text; or fails half-way."""

    def __init__(self, weights: str, *, fails: bool = False) -> None:
        self._weights = weights
        self._fails = fails

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        if self._fails:
            raise OSError(28, "No space left on device")
        (path / "model.safetensors").write_text(self._weights)


def policy(weights: str, *, fails: bool = False) -> PolicyModel:
    return cast("PolicyModel", SavingPolicy(weights, fails=fails))


@pytest.fixture(params=[FakeCheckpointStore, LocalCheckpointStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path)


def test_a_model_is_in_the_directory_returned(store: CheckpointStore) -> None:
    assert isinstance(store, CheckpointStore)
    path = store.save_model(policy("a"), "step_1")
    assert path.name == "step_1"
    assert (path / "model.safetensors").read_text() == "a"


def test_saving_again_replaces(store: CheckpointStore) -> None:
    store.save_model(policy("a"), "final")
    assert (store.save_model(policy("b"), "final") / "model.safetensors").read_text() == "b"


def test_state_is_beside_the_model_and_replaced(store: CheckpointStore) -> None:
    model = store.save_model(policy("a"), "final")
    store.save_state({"step": 1}, "final")
    path = store.save_state({"step": 2, "prompts": {"epoch": 0}}, "final")
    assert path.parent == model.parent
    assert json.loads(path.read_text()) == {"step": 2, "prompts": {"epoch": 0}}


def test_a_model_that_cannot_be_written_is_an_error(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="No space left"):
        store.save_model(policy("a", fails=True), "final")


def test_training_state_comes_back_as_it_was(store: CheckpointStore) -> None:
    assert store.load_training() is None
    update = {"masters": {"a": torch.arange(3.0)}, "adam": [1, {"lr": 0.5}]}
    about = {"settings": {"train.seed": 5}, "data": None}
    for step in (1, 3):
        state = {"run": {"step": step}, "update": update, "before": {"x": 0.5}}
        store.save_training(TrainingState(step=step, state=state, description=about))
    found = store.load_training()
    assert found is not None
    assert (found.step, found.description) == (3, about)
    assert (found.state["run"], found.state["before"]) == ({"step": 3}, {"x": 0.5})
    assert torch.equal(found.state["update"]["masters"]["a"], torch.arange(3.0))
    assert found.state["update"]["adam"] == [1, {"lr": 0.5}]
