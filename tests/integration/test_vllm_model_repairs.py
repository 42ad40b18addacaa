"""Models of vLLM have, once repaired, the weights of their files, in their format, under all names of their class."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rollgrad.adapters.engines.vllm.model_repairs import OTHER_NAMES, repair


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone after the test."""
    from vllm.model_executor.layers.activation import XIELU
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(XIELU, "__init__", XIELU.__init__)
    monkeypatch.setattr(RoutedExperts, "load_weights", RoutedExperts.load_weights)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    repair()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_numbers_of_an_activation_have_the_format_of_the_model(dtype: torch.dtype) -> None:
    """In `dtype` it is then transformers' own."""
    from transformers.activations import XIELUActivation
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(VllmConfig()):
            mine = XIELU()
    finally:
        torch.set_default_dtype(before)
    theirs: Any = XIELUActivation(dtype=dtype)
    with torch.no_grad():
        theirs.alpha_p.fill_(0.7123), theirs.alpha_n.fill_(-0.4321)
    mine.load_state_dict(theirs.state_dict())
    assert {tensor.dtype for tensor in mine.state_dict().values()} == {dtype}
    numbers = torch.linspace(-3, 3, 101, dtype=dtype)
    assert torch.equal(mine.forward_native(numbers), theirs(numbers))


@pytest.mark.parametrize("own", [True, False])
def test_corrections_that_experts_have_are_loaded(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a router, of which experts know, are loaded by the router, under its own name."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e_score_correction_bias: Any = nn.Parameter(torch.zeros(4)) if own else None

        def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
            return list(RoutedExperts.load_weights(self, weights))

        layer_name = "mlp.experts"

        def get_expert_mapping(self, **settings: Any) -> list[Any]:
            return []

    experts, corrections = Experts(), torch.randn(4)
    loaded = experts.load(iter([("e_score_correction_bias", corrections), ("0.w1.weight", torch.ones(2, 2))]))
    assert loaded == (["e_score_correction_bias"] if own else [])
    assert not own or torch.equal(experts.e_score_correction_bias, corrections)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_model_is_vllm_s_own_by_the_name_that_transformers_writes(name: str) -> None:
    import transformers
    from vllm.model_executor.models.registry import ModelRegistry

    assert hasattr(transformers, name)
    found = ModelRegistry.models[name].load_model_cls()
    assert found.__module__.startswith("vllm.model_executor.models.")
    assert "transformers" not in found.__module__
