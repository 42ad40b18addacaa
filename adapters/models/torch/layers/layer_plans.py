"""The plan of the layer that is being computed, where the code of a model does not hand it on to the layer's parts.

A layer notes the plan that it is given while it computes, also when it computes again for gradients, which happens
outside of the model's pass. Mamba's body gives its layers one thing of a pass alone, the mask: the plan goes in its
place.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import frozen
from torch import nn

_PLANS: ContextVar[tuple[Any, ...]] = ContextVar("plans", default=())
"""The plan of each layer that is being computed, the innermost last."""


@frozen(eq=False)
class _InPlaceOfMask:
    plan: Any


def noted_plan() -> Any:
    """Returns the plan of the innermost layer that is being computed and notes its plan; None if there is none."""
    plans = _PLANS.get()
    return plans[-1] if plans else None


def note_plans(body: nn.Module) -> None:
    """Has the layers of the body of a transformers model note the plan of a pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Bodies of states alone call them so, since transformers 5.24 as the old name of `cache`, and hand on masks alone.
    if "cache_params" in inspect.getsource(type(body).forward) and not _is_hooked(body, _plan_as_mask):
        body.register_forward_pre_hook(_plan_as_mask, with_kwargs=True)
    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer) and not _is_hooked(layer, _begin):
            layer.register_forward_pre_hook(_begin, with_kwargs=True)
            layer.register_forward_hook(_end, always_call=True)


@contextmanager
def _noting(plans: tuple[Any, ...]) -> Iterator[None]:
    before = _PLANS.set(plans)
    try:
        yield
    finally:
        _PLANS.reset(before)


def plans_again() -> AbstractContextManager[None]:
    """Returns a block in which a layer is computed again by the plan that is noted now: since transformers 5.23 the
    hooks of a layer, which note its plan, do not run then."""
    return _noting(_PLANS.get())


def loses_plans(body: nn.Module) -> bool:
    """Returns whether a layer of the body of a transformers model takes keywords and hands them to none of its parts:
    its code then names them once."""
    layers = (type(layer) for layer in body.modules() if hasattr(layer, "self_attn"))
    return any(inspect.getsource(kind.forward).count("**kwargs") == 1 for kind in {*layers})


def _is_hooked(part: nn.Module, hook: Any) -> bool:
    return hook in part._forward_pre_hooks.values()


def _plan_as_mask(body: nn.Module, positional: Any, named: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    plan = named.get("attention_plan")
    return None if plan is None else (positional, {**named, "attention_mask": _InPlaceOfMask(plan)})


def _begin(layer: nn.Module, positional: Any, named: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask, plan = named.get("attention_mask"), named.get("attention_plan")
    given = {**named}
    if isinstance(mask, _InPlaceOfMask):
        plan, given["attention_mask"] = mask.plan, None
    _PLANS.set((*_PLANS.get(), plan))
    return positional, given


def _end(*_: Any) -> None:
    _PLANS.set(_PLANS.get()[:-1])
