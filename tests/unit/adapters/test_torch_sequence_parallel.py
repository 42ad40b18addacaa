"""A batch that is divided over processes gives what one process computes, values and gradients."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceGroup
from rollgrad.adapters.models.torch.layers.shared_recurrence import for_each
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing.agent_executor import make_trajectory
from tests.fakes import sequence_parallel
from tests.fakes.sequence_parallel import CASES
from tests.meeting_processes import results_of
from tests.scripts import ScriptHost

TIMEOUT = 300.0

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of columns, and of a gradient as a share of its norm: sums in another order, a few rounding steps
of the format."""

Results = Callable[..., list[dict[str, Any]]]

OBJECTIVES = (*sequence_parallel.OBJECTIVES, "of_teacher", "of_kept_teacher", "of_values")


STATES_IN_HEADS = ("delta_rule", "state_spaces", "state_spaces_with_adapters", "channels", "half_precision_states")
"""Cases with heads that three processes do not divide."""

EVERY = [name for name in CASES if name.startswith("every_")]
"""Cases that show of more models what others show."""

DIVIDED_ALIKE = [
    *("one_sample", "one_head_for_all_queries", "sinks", "capped_scores", "chunks_and_scaled_queries", "adapters"),
    *("prescribed_replies", "compiled", "bfloat16", "fewer_query_heads_than_processes", "layers_with_unlike_heads"),
    *("a_head_each_query", "window", "checkpointing", "four_heads", "branches", "compiled_gradients"),
]
"""Cases that show nothing of three processes that two and four do not."""

ALSO_OF_MORE = [
    *("uneven_heads", "four_heads", "fewer_query_heads_than_processes", "layers_with_unlike_heads", "latent"),
    *("one_sample", "convolutions", "state_spaces_with_adapters", "compiled", "compiled_gradients"),
]
"""Cases that show nothing of two processes that three or four, or another case, do not; and those that are compiled,
which takes each process as long as all others, and is what tests/unit/adapters/test_torch_compiling.py is about."""

MORE = {2: [*EVERY, *ALSO_OF_MORE], 3: DIVIDED_ALIKE, 4: ["another_batch", "delta_rule"]}

NAMES = {
    2: [name for name in CASES if name not in MORE[2]],
    3: [name for name in CASES if name not in (*EVERY, *DIVIDED_ALIKE, *STATES_IN_HEADS, "another_batch")],
    4: [
        "two_heads",
        "one_head_for_all_queries",
        "tied_and_query_norms",
        "fewer_tokens_than_processes",
        "fewer_query_heads_than_processes",
        "four_heads",
        "branches",
        "latent",
        "layers_with_unlike_heads",
        "state_spaces",
        "convolutions",
    ],
}
"""Two teams of two divide the queries of two heads among four processes, four of one process those of one head."""


@pytest.fixture(scope="module")
def results(script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns the results of each of so many processes."""

    @cache
    def computed(processes: int, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("processes")
        cases = names or NAMES[processes]
        return results_of(script_host.python(), "tests.fakes.sequence_parallel", folder, TIMEOUT, processes, cases)

    return computed


@pytest.mark.parametrize(("processes", "name"), [(processes, name) for processes in NAMES for name in NAMES[processes]])
def test_results_and_summed_gradients_are_those_of_one_process(results: Results, processes: int, name: str) -> None:
    assert_as_one_process(results(processes), name)


@pytest.mark.wide
@pytest.mark.parametrize(("processes", "name"), [(processes, name) for processes in MORE for name in MORE[processes]])
def test_so_they_are_of_more_models_and_forms(results: Results, processes: int, name: str) -> None:
    assert_as_one_process(results(processes, tuple(MORE[processes])), name)


@cache
def alone(name: str) -> dict[str, Any]:
    """Results of a case in this process, without compiling."""
    return sequence_parallel.passes(evolve(CASES[name], compiler=""))


def assert_as_one_process(found: list[dict[str, Any]], name: str) -> None:
    tolerance = TOLERANCE[CASES[name].dtype]
    expected = alone(name)
    shares = [result[name] for result in found]
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


@pytest.mark.parametrize(
    ("processes", "name"),
    [*((processes, "tied_and_query_norms") for processes in NAMES), (2, "delta_rule"), (4, "state_spaces")],
)
def test_every_process_has_a_part_of_the_work(results: Results, processes: int, name: str) -> None:
    """Guards the test above: no process alone has the whole gradient."""
    expected = alone(name)["by_token"]
    for result in results(processes):
        own = result[name]["by_token"]
        assert all((own[key] - gradient).norm() > 0.1 * gradient.norm() for key, gradient in expected.items())


@pytest.mark.parametrize("processes", NAMES)
def test_a_process_that_leaves_its_group_computes_alone(results: Results, processes: int) -> None:
    expected = alone("two_heads")
    for result in results(processes):
        assert_same_gradients(result["apart"]["by_token"], expected["by_token"], 1e-6)


@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 6, 2), (6, 3, 2), (8, 2, 4), (4, 1, 4)])
def test_a_process_has_the_groups_of_its_heads(heads: int, groups: int, size: int) -> None:
    """Those that several processes have heads of go to each of them, and their gradients come back as one sum."""
    group_1G = torch.arange(groups, dtype=torch.float32)[None].requires_grad_()
    of_head_H = torch.arange(heads) // (heads // groups)
    for own_1, heads_1 in zip(for_each(group_1G, size).chunk(size, 1), of_head_H.chunk(size), strict=True):
        assert own_1[0].repeat_interleave(heads // size // own_1.shape[1]).tolist() == heads_1.tolist()
    for_each(group_1G, size).sum().backward()
    assert group_1G.grad is not None
    assert group_1G.grad.tolist() == [[math.lcm(groups, size) / groups] * groups]


@pytest.mark.parametrize(("count", "run"), [(4, 1), (40, 1), (64, 2), (512, 16), (10_000, 64)])
def test_where_a_state_is_handed_on_processes_take_turns_with_runs_of_tokens(count: int, run: int) -> None:
    group = SequenceGroup(size=4, heads=4, run=64)
    layout = build_layout(pack([make_trajectory([3], [4] * (count - 1))]))
    tokens_P = group.share(layout).tokens_P
    assert torch.cat(tokens_P).sort()[0].tolist() == [*range(count)]
    assert tokens_P[1][:run].tolist() == [*range(run, 2 * run)]
    assert max(map(len, tokens_P)) - min(map(len, tokens_P)) <= run


def test_a_layer_with_other_heads_than_the_settings_say_is_refused() -> None:
    group = SequenceGroup(size=2, heads=2)
    plan = group.share(build_layout(sequence_parallel.batch(0, 5))).plan(torch.nn.Linear(1, 1))
    query, key = torch.zeros(1, 6, 4, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(ConfigurationError, match=r"layer 1 has 3 key/value heads, .* leave --ds\.sequence"):
        plan.attend(1, query, key, key, ScoreForm(1.0))
