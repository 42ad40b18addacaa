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
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import structlog
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.fusing import compiled, reason
from rollgrad.adapters.models.torch.padded import is_padded
from rollgrad.adapters.models.torch.weight_shards import layer_stacks
from rollgrad.adapters.system.waiting import AFTER_SECONDS
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

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
    _tell_time()
    for part in [part for part in model.modules() if hasattr(part, "experts")]:
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    for layer in [layer for stack in layer_stacks(model) for layer in stack if not hasattr(layer, "experts")]:
        layer.forward = _CompiledForward(layer.forward)


class _CompiledForward:
    """Forward pass of a layer, compiled where the plan of the pass lets it be."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._plain = forward
        self._compiled = compiled(forward)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Returns what the layer computes."""
        plan = named.get("attention_plan")
        forward = self._compiled if plan is not None and plan.compiles else self._plain
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


@cache
def _tell_time() -> None:
    """Has the time that compiling takes logged, from now on."""
    from torch._dynamo.callback import on_compile_end, on_compile_start

    told = _CompileTime()
    on_compile_start(told.begin)
    on_compile_end(told.end)


class _CompileTime:
    """Logs the seconds that compiling has taken in this process, whenever some more have passed."""

    def __init__(self) -> None:
        self._seconds = self._told = self._begun = 0.0

    def begin(self, _: Any) -> None:
        """Notes that torch begins to compile."""
        self._begun = time.monotonic()

    def end(self, _: Any) -> None:
        """Notes that it has ended."""
        self._seconds += time.monotonic() - self._begun
        if self._seconds >= self._told + AFTER_SECONDS:
            self._told = self._seconds
            log.info(f"torch.compile has taken {self._seconds:.0f} s so far (actor.compile)")
