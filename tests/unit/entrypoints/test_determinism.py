"""A run that asks for deterministic kernels computes with them alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.models.torch.determinism import compute_deterministically
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.entrypoints.composition.models import compute_device
from tests.fakes import cluster


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def test_models_are_computed_by_deterministic_kernels_where_settings_say_so() -> None:
    compute_device(ActorConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    compute_device(ActorConfig(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "an operation without such a kernel ends no run"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_updates_need_no_other_kernel(tiny_model_dir: Path) -> None:
    compute_deterministically()
    torch.use_deterministic_algorithms(True)  # an operation without a deterministic kernel is an error
    first, again = cluster.policy(str(tiny_model_dir)), cluster.policy(str(tiny_model_dir))
    assert cluster.trained(first) == cluster.trained(again)
    for name, tensor in first.weights():
        assert torch.equal(tensor, dict(again.weights())[name])
