"""The weight of the entropy bonus as a pure state machine."""

from collections.abc import Mapping

from attrs import evolve, frozen


@frozen(kw_only=True)
class EntropyController:
    """Controller of the entropy bonus (Skywork-OR1, He et al. 2025, section 3.2.5)."""

    coef: float
    """Weight of the bonus; with a target it adapts."""
    target: float | None = None
    """Entropy at or below which the bonus is on; `coef` then grows by `step`, and shrinks by it otherwise. None: the
    weight is always `coef`."""
    step: float = 5e-3
    maximum: float = 1.0
    """Largest `coef`; the smallest is 0."""
    low: bool = False

    @property
    def weight(self) -> float:
        """Weight of the bonus in the next update."""
        return self.coef if self.target is None or self.low else 0.0

    def observe(self, entropy: float) -> "EntropyController":
        """Returns the controller after an update in which the policy's entropy per token (nats) was `entropy`."""
        if self.target is None:
            return self
        low = entropy <= self.target
        coef = self.coef + (self.step if low else -self.step)
        return evolve(self, low=low, coef=min(max(coef, 0.0), self.maximum))

    def state_dict(self) -> dict[str, float]:
        """Returns the part that changes."""
        return {"coef": self.coef, "low": float(self.low)}

    def load_state_dict(self, state: Mapping[str, float]) -> "EntropyController":
        """Returns this controller with the values of `state`."""
        return evolve(self, coef=float(state["coef"]), low=bool(state["low"]))
