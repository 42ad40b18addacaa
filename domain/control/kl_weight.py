"""The weight of the KL term as a pure state machine."""

import math
from collections.abc import Mapping

from attrs import evolve, frozen

MAX_ERROR = 0.2
"""Bound on the proportional error (Ziegler et al. 2019, section 2.2)."""


@frozen(kw_only=True)
class KLController:
    """Controller of the KL weight `coef`. With a `target` (KL per action token) the weight adapts over about `horizon`
    samples. One update changes it by a fifth at most, even with more samples than the horizon, so that it stays above
    0."""

    coef: float
    target: float | None = None
    horizon: float = 10000.0

    def update(self, kl: float, samples: int) -> "KLController":
        """Returns the controller after `samples` samples with mean `kl` (Ziegler et al. 2019, section 2.2). It stays
        the same without a target, or if `kl` is not finite."""
        if self.target is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        # The share is bounded by 1: with more samples than the horizon the factor could fall below 0.
        return evolve(self, coef=self.coef * (1.0 + error * min(1.0, samples / self.horizon)))

    def state_dict(self) -> dict[str, float]:
        """Returns the part that changes."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> "KLController":
        """Returns this controller with the weight of `state`."""
        return evolve(self, coef=float(state["coef"]))
