"""Layers of a model compiled by `torch.compile`, each on its own: what lies between matrix products (norms, rotary
embeddings, activations) is fused.

All layers alike share their graphs, whose number of tokens is a variable: a pack of another size compiles nothing anew.
Attention, which follows a plan of each pass (`attention.py`), and the experts of a mixture, whose shapes depend on
where routers send tokens, are computed between the graphs, as without them.
Invariants: the engine's passes are never compiled, also where it computes with the trainer's model; names of parameters
stay as they are; hooks of a layer, such as FSDP2's, remain outside of its graphs.
Does not own: what a layer computes, nor its division over processes, which follows.
"""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.fusing import compiled, reason, tell_time
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.weight_shards import layer_stacks
from rollgrad.domain.errors import ConfigurationError

TURNED_OFF = "TORCHDYNAMO_DISABLE"
"""Environment variable with which torch compiles nothing, without a word."""


def compile_layers(model: Any) -> None:
    """Compiles the layers of a language model with packed attention installed, each when it first computes.

    Raises:
        ConfigurationError: the model is computed padded, or this machine cannot compile.
    """
    if is_padded(model):
        raise ConfigurationError(
            f"actor.compile is on, but {type(model).__name__} is computed with padding, whose layers are not compiled: "
            "leave --actor.compile out."
        )
    _require_compiler(next(model.parameters()).device)
    tell_time("actor.compile")
    for part in [part for part in model.modules() if hasattr(part, "experts")]:
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    for layer in [layer for stack in layer_stacks(model) for layer in stack if not hasattr(layer, "experts")]:
        layer.forward = _CompiledForward(layer)


class _CompiledForward:
    """Forward pass of a layer, compiled where the plan of the pass lets it be."""

    def __init__(self, layer: Any) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        # Since transformers 5.23 the class of a layer wraps its forward pass into what computes it again for gradients,
        # which is no part of what is compiled.
        wraps = "__init_subclass__" in vars(GradientCheckpointingLayer)
        self._wrapped = wraps and isinstance(layer, GradientCheckpointingLayer)
        self._layer = layer
        own: Any = type(layer).forward
        self._plain = partial(own.__wrapped__, layer) if self._wrapped else layer.forward
        self._compiled = compiled(self._plain)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Returns what the layer computes."""
        plan, layer = named.get("attention_plan"), self._layer
        forward = self._compiled if plan is not None and plan.compiles else self._plain
        if self._wrapped and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
            return layer._gradient_checkpointing_func(partial(forward, **named), *positional)
        return forward(*positional, **named)


def _require_compiler(device: torch.device) -> None:
    """Compiles a small function.

    Raises:
        ConfigurationError: that fails, or is turned off.
    """
    if os.environ.get(TURNED_OFF) == "1":
        raise ConfigurationError(
            f"actor.compile is on, but the environment variable {TURNED_OFF} is 1, which turns torch.compile off: "
            "unset it, or leave --actor.compile out."
        )
    try:
        torch.compile(_doubled)(torch.ones(2, device=device))
    except Exception as error:  # of torch, of Triton, or of the compiler that is not there
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++, or the variable CXX)"
        raise ConfigurationError(
            f"actor.compile is on, but torch.compile fails on this machine ({reason(error)}): install {needed}, or "
            "leave --actor.compile out."
        ) from error


def _doubled(x: Tensor) -> Tensor:
    return x + x
