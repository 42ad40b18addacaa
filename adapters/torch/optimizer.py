"""AdamW on float32 master weights under a model that computes in another format.

Invariants: gradients of all micro-batches of a step are summed in float32; a step with a non-finite gradient changes
nothing; after `step` the compute weights equal the rounded masters.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from rollgrad.domain.errors import NonFiniteUpdateError
from rollgrad.domain.schedule import lr_factor


@frozen(kw_only=True)
class OptimizerSettings:
    """Learning rate (peak), AdamW's constants, schedule over `total_steps` optimizer steps, and the norm to clip at
    (0: never)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    scheduler: str = "constant"
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.1
    max_norm: float = 1.0
    total_steps: int = 1


class MasterOptimizer:
    """Owns the master weights of `module`'s trainable parameters."""

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._names, self._params = zip(
            *((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True
        )
        self._masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self._params]
        for param, master in zip(self._params, self._masters, strict=True):
            if param is not master:
                param.register_post_accumulate_grad_hook(_move_gradient_to(master))
        decayed = [m for m in self._masters if m.ndim > 1]
        rest = [m for m in self._masters if m.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self._steps = 0

    def step(self) -> dict[str, float]:
        """Clips, steps, copies masters to compute weights, clears gradients; returns `grad_norm` and `lr`.

        Raises:
            NonFiniteUpdateError: the gradient norm is NaN or infinite; weights are untouched, gradients cleared.
        """
        gradients = [m.grad for m in self._masters if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(norm):
            self.clear()
            raise NonFiniteUpdateError(
                f"The gradient norm of optimizer step {self._steps} is {norm}; the step was not applied. "
                "Lower --actor.adam.lr or check the rewards."
            )
        limit = self._settings.max_norm
        if limit and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        lr = self._settings.lr * self._factor()
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.clear()
        self._publish()
        self._steps += 1
        return {"grad_norm": norm, "lr": lr}

    def clear(self) -> None:
        """Drops accumulated gradients."""
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Masters, moments and step count."""
        masters = {name: m.detach().clone() for name, m in zip(self._names, self._masters, strict=True)}
        return {"steps": self._steps, "masters": masters, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict` and the compute weights."""
        self._steps = int(state["steps"])
        with torch.no_grad():
            for name, master in zip(self._names, self._masters, strict=True):
                master.copy_(state["masters"][name])
        self._adam.load_state_dict(state["adam"])
        self._publish()

    def masters(self) -> dict[str, Tensor]:
        """Master weights by parameter name."""
        return dict(zip(self._names, (m.detach() for m in self._masters), strict=True))

    def _factor(self) -> float:
        s = self._settings
        return lr_factor(
            s.scheduler, self._steps, total_steps=s.total_steps, warmup_ratio=s.warmup_ratio, min_ratio=s.min_lr_ratio
        )

    @torch.no_grad()
    def _publish(self) -> None:
        pairs = [(p, m) for p, m in zip(self._params, self._masters, strict=True) if p is not m]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(params, masters)


def _move_gradient_to(master: Tensor) -> Any:
    """A hook that adds a compute-format gradient to the master's float32 one and frees it."""

    def hook(param: Tensor) -> None:
        if param.grad is not None:
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

    return hook
