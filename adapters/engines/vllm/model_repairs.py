"""Repairs of models of vLLM 0.32 that have other weights than their files, or do not know them, wherever they compute.
Does not own: kernels of a CPU (`cpu_repairs.py`), nor what a trainer sends (`loaders.py`)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

CORRECTION = "e_score_correction_bias"
"""Name of what is added to the scores of experts where these are chosen."""

OTHER_NAMES = {"PhimoeForCausalLM": "vllm.model_executor.models.phimoe:PhiMoEForCausalLM"}
"""vLLM's own models by the names that transformers writes to files for them: published files have another one."""


def repair() -> None:
    """Repairs vLLM's models that are made from now on in this process."""
    from vllm.model_executor.models.registry import ModelRegistry

    _load_corrections()
    _keep_activations_in_format()
    for name, place in OTHER_NAMES.items():
        ModelRegistry.register_model(name, place)


def _load_corrections() -> None:
    """Lets experts load corrections that are theirs (Laguna), not their router's: their loader leaves out all that is
    no expert's, so that the corrections would stay 0."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    load = RoutedExperts.load_weights

    def loaded(experts: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        others = []
        for name, tensor in weights:
            if name == CORRECTION and CORRECTION in experts._parameters:
                experts.e_score_correction_bias.data.copy_(tensor)
                yield name
            else:
                others.append((name, tensor))
        yield from load(experts, others)

    RoutedExperts.load_weights = loaded


def _keep_activations_in_format() -> None:
    """Lets the learned numbers of xIELU (Apertus) have the model's format, as in transformers, and not always
    bfloat16."""
    from vllm.model_executor.layers.activation import XIELU

    make = XIELU.__init__

    def made(layer: Any, *arguments: Any, **settings: Any) -> None:
        make(layer, *arguments, **{"dtype": torch.get_default_dtype(), **settings})

    XIELU.__init__ = made
