"""Reaction to gradients that are not finite. In float16 the step is skipped and the loss scale lowered; in any other
format, or at the lowest scale, the run ends.

Does not own: the rule of the scale (`domain.control.loss_scale`), nor the gradients.
"""

from collections.abc import Mapping
from typing import Any

import structlog
import torch
from attrs import asdict
from torch import nn

from rollgrad.domain.batches.metrics import Common, Count
from rollgrad.domain.control.loss_scale import SMALLEST, LossScale
from rollgrad.domain.errors import NonFiniteUpdateError

log = structlog.get_logger(__name__)

STATE = "loss_scale"
"""Key of the scale in a `TrainedModule.state_dict`."""


class Scaling:
    """The loss scale of `module`, if it computes in float16; `tells`: whether this process logs for all of
    them."""

    def __init__(self, module: nn.Module, *, tells: bool = True) -> None:
        self.active = any(parameter.dtype == torch.float16 for parameter in module.parameters())
        """Whether there is a loss scale."""
        self._scale = LossScale()
        self._tells = tells

    @property
    def factor(self) -> float:
        """Factor by which the loss is multiplied and gradients are divided; 1 without a scale."""
        return self._scale.factor if self.active else 1.0

    def applied(self) -> dict[str, float]:
        """Records a step; returns its metrics, none without a scale."""
        metrics = self._metrics(skipped=0.0)
        self._scale = self._scale.followed_by(overflow=False)
        return metrics

    def skipped(self, step: int, norm: float) -> dict[str, float]:
        """Records that the `step`-th step is skipped because its gradient norm `norm` is not finite; returns its
        metrics.

        Raises:
            NonFiniteUpdateError: no smaller scale is left.
        """
        if self.factor <= SMALLEST:
            advice = "set --actor.dtype bfloat16, or" if self.active else "lower --actor.adam.lr or"
            format_ = " in float16, without a loss scale" if self.active else ""
            raise NonFiniteUpdateError(
                f"The gradient norm of optimizer step {step} is {norm}{format_}; the step was not applied: {advice} "
                "check the rewards."
            )
        metrics = self._metrics(skipped=1.0)
        self._scale = self._scale.followed_by(overflow=True)
        if self._tells:
            log.warning("a gradient overflowed float16: the step is skipped", step=step, next_loss_scale=self.factor)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns its part of a `TrainedModule.state_dict`."""
        return {STATE: asdict(self._scale)} if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from such a state; the state of another number format has no scale, and changes nothing."""
        if STATE in state:
            self._scale = LossScale(**state[STATE])

    def _metrics(self, *, skipped: float) -> dict[str, float]:
        return {"loss_scale": Common(self.factor), "skipped_steps": Count(skipped)} if self.active else {}
