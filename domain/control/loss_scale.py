"""Dynamic loss scaling: float16 has no numbers below 6e-8, and smaller gradients would be 0. The loss is multiplied by
a power of two before the backward pass, and gradients are divided by it before they are used (Micikevicius et al. 2018,
"Mixed Precision Training", sections 3.2 and 4).

Does not own: gradients, nor what is done about one that overflows.
"""

from attrs import evolve, frozen

FIRST = 2.0**16
"""What DeepSpeed and PyTorch start from. It is too large at first for most losses, which the first steps find out."""

SMALLEST = 1.0
"""What overflows without a scale is no matter of the scale."""

WINDOW = 1000
"""Steps without an overflow after which a larger scale is tried, as in DeepSpeed."""


@frozen
class LossScale:
    """The `factor` of the loss, and how many steps went `well` since it became that."""

    factor: float = FIRST
    well: int = 0

    def followed_by(self, *, overflow: bool) -> "LossScale":
        """Returns the scale of the next step, if the gradient of this one overflowed, or did not."""
        if overflow:
            return LossScale(factor=max(SMALLEST, self.factor / 2))
        if self.well + 1 == WINDOW:
            return LossScale(factor=self.factor * 2)
        return evolve(self, well=self.well + 1)
