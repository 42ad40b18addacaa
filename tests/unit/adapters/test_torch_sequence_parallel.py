"""A batch that is divided over processes gives what one process computes, values and gradients."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.layout import build_layout
from rollgrad.adapters.models.torch.sequence_parallel import SequenceGroup
from rollgrad.domain.errors import ConfigurationError
from tests.fakes import sequence_parallel
from tests.fakes.sequence_parallel import CASES
from tests.meeting_processes import results_of
from tests.scripts import ScriptHost

TIMEOUT = 300.0

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of columns, and of a gradient as a share of its norm: sums in another order, a few rounding steps
of the format."""

Results = Callable[[int], list[dict[str, Any]]]

OBJECTIVES = (*sequence_parallel.OBJECTIVES, "of_teacher", "of_kept_teacher", "of_values")


NAMES = {
    2: list(CASES),
    3: [name for name in CASES if name != "another_batch"],
    4: [
        "another_batch",
        "two_heads",
        "one_head_for_all_queries",
        "tied_and_query_norms",
        "fewer_tokens_than_processes",
        "fewer_query_heads_than_processes",
        "four_heads",
        "branches",
        "latent",
        "layers_with_unlike_heads",
    ],
}
"""Two teams of two divide the queries of two heads among four processes, four of one process those of one head."""


@pytest.fixture(scope="module")
def results(script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns the results of each of so many processes."""

    @cache
    def computed(processes: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("processes")
        return results_of(
            script_host.python(), "tests.fakes.sequence_parallel", folder, TIMEOUT, processes, NAMES[processes]
        )

    return computed


@pytest.mark.parametrize(("processes", "name"), [(processes, name) for processes in NAMES for name in NAMES[processes]])
def test_results_and_summed_gradients_are_those_of_one_process(results: Results, processes: int, name: str) -> None:
    tolerance = TOLERANCE[CASES[name].dtype]
    expected = sequence_parallel.passes(evolve(CASES[name], compiles=False))
    shares = [result[name] for result in results(processes)]
    for share in shares:
        for column in ("logprobs", "entropy", "values", "divergence_of_teacher", "divergence_of_kept_teacher"):
            torch.testing.assert_close(share[column], expected[column], rtol=tolerance, atol=tolerance)
            assert torch.equal(share[column], shares[0][column]), "all compute the same loss"
    for objective in OBJECTIVES:
        assert_same_gradients(summed([share[objective] for share in shares]), expected[objective], tolerance)


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    size = max(float(gradient.norm()) for gradient in expected.values())
    assert size > 0
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-6 * size, name


@pytest.mark.parametrize("processes", NAMES)
def test_every_process_has_a_part_of_the_work(results: Results, processes: int) -> None:
    """Guards the test above: no process alone has the whole gradient."""
    name = "tied_and_query_norms"
    expected = sequence_parallel.passes(CASES[name])["by_token"]
    for result in results(processes):
        own = result[name]["by_token"]
        assert all((own[key] - gradient).norm() > 0.1 * gradient.norm() for key, gradient in expected.items())


@pytest.mark.parametrize("processes", NAMES)
def test_a_process_that_leaves_its_group_computes_alone(results: Results, processes: int) -> None:
    expected = sequence_parallel.passes(CASES["two_heads"])
    for result in results(processes):
        assert_same_gradients(result["apart"]["by_token"], expected["by_token"], 1e-6)


def test_a_layer_with_other_heads_than_the_settings_say_is_refused() -> None:
    group = SequenceGroup(size=2, heads=2)
    plan = group.share(build_layout(sequence_parallel.batch(0, 5))).plan(torch.nn.Linear(1, 1))
    query, key = torch.zeros(1, 6, 4, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(ConfigurationError, match=r"layer 1 has 3 key/value heads, .* leave --ds\.sequence"):
        plan.attend(1, query, key, key, 1.0, None)
