"""Layers whose code hands no keywords on are packed: the plan reaches their parts, also when they compute again."""

from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.layers.layer_plans import loses_plans, noted_plan
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from tests.model_sweep import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE, engine_gap, packed_gaps
from tests.recomputed import recompute
from tests.tiny_architectures import tiny_model
from tests.unit.adapters.test_torch_recurrence import forest

FAMILIES = ("nemotron", "stablelm")


def made(model_type: str) -> tuple[Any, Any]:
    """A model as it is, and packed."""
    plain, model = tiny_model(model_type), tiny_model(model_type)
    plain.set_attn_implementation("eager")
    install_and_compare(model)
    assert not is_padded(model)
    return plain, model


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_forest_has_the_values_and_gradients_of_its_sequences(model_type: str, recomputes: bool) -> None:
    plain, model = made(model_type)
    if recomputes:
        recompute(model)
    value_gap, gradient_gap = packed_gaps(plain, model, forest())
    assert value_gap < LOGPROB_TOLERANCE
    assert gradient_gap < GRADIENT_TOLERANCE
    assert noted_plan() is None


@pytest.mark.parametrize("model_type", FAMILIES)
async def test_the_embedded_engine_is_exact(model_type: str) -> None:
    plain, model = (each.requires_grad_(False) for each in made(model_type))
    check_decoding(model, "--model")
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=3)
    assert await engine_gap(plain, engine, 60) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "gpt2", "qwen3_5_text"])
def test_layers_that_hand_keywords_on_are_left_alone(model_type: str) -> None:
    model = tiny_model(model_type)
    assert not loses_plans(backbone(model))
    install_and_compare(model)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_layer_that_fails_leaves_no_plan_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = made("nemotron")
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda _: torch.zeros(()).view(2))
    with pytest.raises(RuntimeError, match="shape"):
        PackedLM(model)(forest())
    assert noted_plan() is None
