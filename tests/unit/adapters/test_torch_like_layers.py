"""A pass over a few layers of each kind, stretched to all, holds what a pass over all layers holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.torch.planning import pass_memory
from rollgrad.adapters.models.torch.planning.like_layers import LikeLayers, Span, together
from rollgrad.adapters.models.torch.planning.pass_memory import measured_passes
from rollgrad.application.settings.model_shape import PassMemory
from rollgrad.application.settings.sections.actor import Checkpointing
from tests.tiny_architectures import tiny_config

CPU = torch.device("cpu")
LAYERS = 5
WINDOWS = [("sliding_attention", "full_attention")[place % 2] for place in range(LAYERS)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "bloom": {},  # which is computed with padding
    "gemma3_text": {"layer_types": WINDOWS},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "qwen3_5_text": {"layer_types": [("linear_attention", "full_attention")[place % 2] for place in range(LAYERS)]},
}
"""Settings of models with several kinds of layers, and some of one kind, one after the other."""
MORE = "gpt2", "gemma3_text", "qwen3_5_text"
"""Those among them that show what others do, or take longest."""


def saved_config(architecture: str, path: Path) -> str:
    """Returns the directory of the settings of a model with `LAYERS` layers."""
    name = "n_layer" if architecture in ("gpt2", "bloom") else "num_hidden_layers"
    tiny_config(architecture, **{name: LAYERS}, **KINDS[architecture]).save_pretrained(path)
    return str(path)


def measured(path: str, **settings: Any) -> PassMemory | None:
    return measured_passes(path, dtype=torch.float32, device=CPU, longest=16, prompt=16, **settings)


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has passes measured of two sizes, one sequence and many, which takes less time."""
    monkeypatch.setattr(pass_memory, "PACKED", (1024,))


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers the models have that are passed over."""
    counts: list[int] = []

    class Counted(LikeLayers):
        def __init__(self, model: Any, *, shorter: bool = True) -> None:
            super().__init__(model, shorter=shorter)
            layers = getattr(model.base_model, "layers", getattr(model.base_model, "h", ()))
            counts.append(len(layers))

    monkeypatch.setattr(pass_memory, "LikeLayers", Counted)
    return counts


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *(pytest.param(name, Checkpointing.OFF, marks=pytest.mark.wide if name in MORE else ()) for name in KINDS),
        ("llama", Checkpointing.FULL),
        pytest.param("llama", Checkpointing.SELECTIVE, marks=pytest.mark.wide),
    ],
)
def test_what_a_few_layers_hold_tells_what_all_hold(
    architecture: str, kind: Checkpointing, tmp_path: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_config(architecture, tmp_path)
    found = measured(path, checkpointing=kind)
    assert found is not None
    assert max(passed) < LAYERS
    monkeypatch.setattr(pass_memory, "LikeLayers", lambda model, shorter: LikeLayers(model, shorter=False))
    assert measured(path, checkpointing=kind) == found


def test_a_model_is_passed_over_whole_where_its_layers_do_not_follow_each_other(
    tmp_path: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stretched = saved_config("llama", tmp_path), LikeLayers.stretched
    found = measured(path)

    def of_one_less(self: LikeLayers, spans: list[Span], **settings: Any) -> list[Span]:
        return stretched(self, spans if self._kept is None else spans[1:], **settings)

    monkeypatch.setattr(LikeLayers, "stretched", of_one_less)
    assert measured(path) == found
    assert passed == [2, 2, LAYERS]


def test_spans_that_follow_each_other_rise_from_where_the_one_before_ended() -> None:
    assert together([Span(5, 3, 1), Span(1, -2, 0), Span(6, 0, 2)]) == Span(7, 1, 3)
    assert together([]) == Span(0, 0, 0)
