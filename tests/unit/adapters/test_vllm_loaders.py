"""Models of vLLM that load experts one by one get of joined experts what they find in files; loaders have names."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.engines.vllm.loaders import ONE_BY_ONE, complete_loaders
from rollgrad.adapters.models.torch.sent_names import sent_weights
from tests.tiny_architectures import tiny_model

MODELS = {
    "axk1": "AXK1ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
"""Names of vLLM's models by the types of transformers."""


class Loaded(nn.Module):
    """Keeps what it is to load."""

    def __init__(self) -> None:
        super().__init__()
        self.came: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.came = dict(weights)
        return {*self.came}


def loaded(kind: str, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors that a model of vLLM gets, whose class has the name `kind`, in another model."""
    model = Loaded()
    model.part = type(kind, (nn.Module,), {})()
    complete_loaders(model)
    assert model.load_weights(weights) == model.came.keys()
    return model.came


@pytest.mark.parametrize("name", MODELS)
def test_experts_have_the_names_and_numbers_of_files(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    sent: list[tuple[str, Tensor]] = [(each.name, each.parameter.detach()) for each in sent_weights(model)]
    found, files = (
        {name: tensor for name, tensor in one.items() if ".experts." in name}
        for one in (loaded(MODELS[name], sent), load_file(tmp_path / "model.safetensors"))
    )
    assert found.keys() == files.keys() != set()
    assert all(torch.equal(found[name], files[name]) for name in files)
    assert loaded("Qwen3MoeForCausalLM", sent) == dict(sent), "most models take joined experts as they are"


def test_each_model_that_loads_one_by_one_is_examined() -> None:
    assert set(MODELS.values()) == ONE_BY_ONE


def test_a_loader_without_a_name_gets_that_of_its_function() -> None:
    model, weight = Loaded(), cast(Any, nn.Parameter(torch.empty(1)))
    weight.weight_loader = partial(loaded)
    model.register_parameter("weight", weight)
    complete_loaders(model)
    assert weight.weight_loader.__name__ == "loaded"


def test_experts_are_not_turned_that_lie_as_in_transformers() -> None:
    """Those of Qwen3-VL, which lie the other way round in files."""
    model, experts = Loaded(), cast(Any, nn.Module())
    experts.is_fused_checkpoint_transposed = True
    model.experts = experts
    complete_loaders(model)
    assert not experts.is_fused_checkpoint_transposed


def test_a_bias_that_a_model_registers_anew_stays_where_kernels_read_it() -> None:
    """vLLM's models of transformers' code make one each time that they load it."""

    class Head(nn.Linear):
        def _register_bias(self) -> None:
            self.bias = nn.Parameter(torch.empty(2))

    model = Loaded()
    model.lm_head = Head(3, 2)
    before = model.lm_head.bias
    complete_loaders(model)
    model.lm_head._register_bias()
    assert model.lm_head.bias is before


def test_parts_are_views() -> None:
    joined = torch.arange(24.0).view(2, 4, 3)
    parts = loaded("DeepseekV3ForCausalLM", [("a.experts.gate_up_proj", joined)])
    assert [*parts] == [f"a.experts.{n}.{part}.weight" for n in (0, 1) for part in ("gate_proj", "up_proj")]
    assert {part.untyped_storage().data_ptr() for part in parts.values()} == {joined.untyped_storage().data_ptr()}
