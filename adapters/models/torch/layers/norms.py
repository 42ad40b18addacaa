"""RMS norms of a language model, each in one kernel on a GPU (`torch.nn.functional.rms_norm`).

Transformers writes the formula out (Zhang and Sennrich 2019, arXiv:1910.07467: x / sqrt(mean(x^2) + eps) times
weights), whose operations each read and write the hidden states in float32, and keep some of them for the backward
pass. The kernel rounds the product alone to the compute format, and not the factor before it too.
Does not own: norms with another formula, such as Gemma's 1 + weights or gated ones, which stay as they are.
"""

import copy
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16
"""Numbers of the hidden states by which a norm's formula is found out."""


def install_norms(model: nn.Module) -> None:
    """Has the RMS norms of a model computed in one kernel where their hidden states are on a GPU."""
    for norm in rms_norms(model):
        norm.forward = MethodType(_forward, norm)


def rms_norms(model: nn.Module) -> Iterator[Any]:
    """Yields the modules whose formula is that of an RMS norm, with the weights as they are."""
    for module in model.modules():
        if list(module._parameters) == ["weight"] and "forward" not in vars(module) and _is_rms_norm(module):
            yield module


def _epsilon(norm: Any) -> Any:
    """Returns what an RMS norm of transformers adds to the mean square; None of a module that has no such number."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    compiling = torch.compiler.is_compiling()  # which fuses the formula with what is before and after it
    if hidden_states.is_cuda and hidden_states.dtype == self.weight.dtype and not compiling:
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, _epsilon(self))
    result: Tensor = type(self).forward(self, hidden_states)
    return result


def _is_rms_norm(module: Any) -> bool:
    """Returns whether a module computes an RMS norm: of numbers as small as the epsilon, too."""
    epsilon = _epsilon(module)
    if not isinstance(epsilon, float):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:  # itself and the hidden states
        return False
    probe = copy.copy(module)  # a copy, whose weights may be replaced, and whose hooks are not called
    weight = torch.linspace(0.5, 1.5, WIDTH)
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    unit = torch.linspace(-3, 4, 2 * WIDTH).sin().view(2, WIDTH)
    for hidden in (unit, unit * epsilon**0.5):
        try:
            found = type(module).forward(probe, hidden)
        except Exception:  # the code of a model, with a shape that it may not have been made for
            return False
        expected = functional.rms_norm(hidden, (WIDTH,), weight, epsilon)
        if not (isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)):
            return False
    return True
