"""Dynamic loss scaling: float16 rounds numbers below 6e-8 to 0, so that small gradients would vanish. The loss is
multiplied by a power of two before the backward pass, and gradients are divided by it before they are used
(Micikevicius et al. 2018, "Mixed Precision Training", sections 3.2 and 4).

Does not own: gradients, nor skipping a step whose gradient overflows.
"""

from attrs import evolve, frozen

FIRST = 2.0**16
"""Initial scale, as in DeepSpeed and PyTorch. It is too large for most losses, so that the first steps lower it."""

SMALLEST = 1.0
"""Lower bound: an overflow at scale 1 is not caused by scaling."""

WINDOW = 1000
"""Steps without an overflow after which a larger scale is tried, as in DeepSpeed."""


@frozen
class LossScale:
    """The `factor` of the loss, and `well`, the number of steps without an overflow since it changed."""

    factor: float = FIRST
    well: int = 0

    def followed_by(self, *, overflow: bool) -> "LossScale":
        """Returns the scale of the next step; `overflow` says whether the gradient of this one overflowed."""
        if overflow:
            return LossScale(factor=max(SMALLEST, self.factor / 2))
        if self.well + 1 == WINDOW:
            return LossScale(factor=self.factor * 2)
        return evolve(self, well=self.well + 1)
