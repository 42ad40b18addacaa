"""Experts that processes divide compute what all of them in one process do, values and gradients."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.experts.expert_parallel import expert_stacks
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.domain.errors import ConfigurationError
from tests.fakes import expert_parallel
from tests.meeting_processes import results_of
from tests.scripts import ScriptHost
from tests.tiny_architectures import tiny_config, tiny_model

TIMEOUT = 300.0
SIZE = 2
"""Processes that divide the experts."""

FAMILIES = ("mixtral", "gpt_oss", "nemotron_h")
"""Mixtures with gates, with biases and turned matrices, and without gates."""

WIDE = (
    *("afmoe", "aria_text", "axk1", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v3", "hy_v4", "inkling_text", "jamba", "kimi_linear", "laguna", "lfm2_moe", "mellum"),
    *("mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "olmoe", "phimoe", "qwen2_moe"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text"),
    *("solar_open", "zaya"),
)
"""All others whose experts are divided, that is which go through transformers' interface of experts."""

Results = Callable[[int, tuple[str, ...]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns the results of each of so many processes, for the families."""

    @cache
    def computed(processes: int, families: tuple[str, ...]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("processes")
        return results_of(script_host.python(), "tests.fakes.expert_parallel", folder, TIMEOUT, processes, families)

    return computed


@pytest.mark.parametrize(
    ("processes", "families", "family"),
    [
        *((2, FAMILIES, family) for family in FAMILIES),
        pytest.param(4, ("mixtral",), "mixtral", marks=pytest.mark.wide),
        *(pytest.param(2, WIDE, family, marks=pytest.mark.wide) for family in WIDE),
    ],
)
def test_results_and_summed_gradients_are_those_of_one_process(
    results: Results, processes: int, families: tuple[str, ...], family: str
) -> None:
    model = tiny_model(family)
    expected = [expert_parallel.passed(model, expert_parallel.sequence(rank)) for rank in range(processes)]
    found = [result[family] for result in results(processes, families)]
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
    wanted = summed([each["gradients"] for each in expected])
    of_all = summed([each["gradients"] for each in found])
    divided = [summed([each["gradients"] for each in found[rank::SIZE]]) for rank in range(SIZE)]
    stacks = {name for name, part in model.named_modules() if part in expert_stacks(model, SIZE)}
    assert stacks
    size = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        if name.rpartition(".")[0] in stacks:  # a process whose experts got no token has no gradient
            parts = zip(divided, gradient.chunk(SIZE), strict=True)
            own = torch.cat([each[name] if name in each else torch.zeros_like(part) for each, part in parts])
        else:
            own = of_all[name]
        assert (own - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * size, name


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the sum by name, of those that have one."""
    total: dict[str, Tensor] = {}
    for own in gradients:
        for name, gradient in own.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


@pytest.mark.parametrize(
    ("family", "size", "problem"),
    [
        ("llama", 2, "but LlamaForCausalLM has no experts: leave --cluster.expert_parallel_size out"),
        ("dbrx", 2, "but DbrxForCausalLM computes experts in another way than by transformers' interface of experts"),
        ("llama4_text", 2, "but Llama4ForCausalLM computes experts in another way"),
        ("longcat_flash", 2, "but LongcatFlashForCausalLM computes experts in another way"),
        ("mixtral", 3, "which does not divide the 4 experts in a layer of MixtralForCausalLM: set --cluster.expert"),
    ],
)
def test_a_model_whose_experts_cannot_be_divided_is_refused_by_name(family: str, size: int, problem: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    with pytest.raises(ConfigurationError, match=f"^cluster.expert_parallel_size is {size}, {problem}"):
        expert_stacks(model, size)
    if family == "llama":
        assert expert_stacks(model, size, required=False) == []


def test_the_shape_of_a_model_counts_its_experts(tmp_path: Path) -> None:
    """And is refused where the run would be."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    assert model_shape("actor.model_name_or_path", str(tmp_path)).experts == 0
    shape = model_shape("actor.model_name_or_path", str(tmp_path), expert_parallel_size=SIZE)
    assert shape.experts_per_token == 2
    model = tiny_model("mixtral")
    assert shape.experts == sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) > 0
    with pytest.raises(ConfigurationError, match="is 3, which does not divide the 4 experts"):
        model_shape("actor.model_name_or_path", str(tmp_path), expert_parallel_size=3)
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="is 2, but LlamaForCausalLM has no experts"):
        model_shape("actor.model_name_or_path", str(tmp_path), expert_parallel_size=SIZE)
    assert model_shape("reward.model_name_or_path", str(tmp_path), expert_parallel_size=SIZE).experts == 0
