"""Processes that share sequences with images compute what one process does, the tower's gradients too."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import image_sequences
from tests.meeting_processes import results_of
from tests.scripts import ScriptHost
from tests.tiny_vision import FAMILIES as ATTENDING

FAMILIES = (*ATTENDING, "qwen3_5")
TIMEOUT = 300.0
PROCESSES = 3
"""More than the models have key/value heads."""


@pytest.fixture(scope="module")
def shares(script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process."""
    folder = tmp_path_factory.mktemp("processes")
    return results_of(script_host.python(), "tests.fakes.image_sequences", folder, TIMEOUT, PROCESSES, FAMILIES)


@cache
def alone(family: str) -> dict[str, Any]:
    """Results of a family in this process."""
    return image_sequences.passes(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", ["images", "texts"])
def test_values_and_summed_gradients_are_those_of_one_process(
    shares: list[dict[str, Any]], family: str, batch: str
) -> None:
    expected = alone(family)[batch]
    found = [share[family][batch] for share in shares]
    for own in found:
        for column in ("logprobs", "entropy", "values"):
            torch.testing.assert_close(own[column], expected[column], rtol=1e-5, atol=1e-5)
    for name in ("gradients", "gradients_of_values"):
        assert_same([own[name] for own in found], expected[name])
        tower = [float(gradient.abs().max()) for key, gradient in expected[name].items() if "vis" in key]
        assert any(size > 0 for size in tower) == (batch == "images")


def assert_same(shares: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert all(share.keys() == expected.keys() for share in shares)
    for name, gradient in expected.items():
        summed = torch.stack([share[name] for share in shares]).sum(0)
        torch.testing.assert_close(summed, gradient, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_process_has_a_part_of_the_tower_s_gradient(shares: list[dict[str, Any]], family: str) -> None:
    """Guards the test above: none has the whole of it."""
    expected = alone(family)["images"]["gradients"]
    for share in shares:
        own = share[family]["images"]["gradients"]
        gaps = [float((own[name] - whole).norm() / whole.norm()) for name, whole in expected.items() if "vis" in name]
        assert max(gaps) > 0.1
