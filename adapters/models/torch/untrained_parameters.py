"""Proof that an optimizer reaches every parameter that it was given.

A parameter that takes no part in what a model computes gets no gradient and stays what it is, while loss and gradient
norm look as they should. Does not own: gradients that are not finite (`optimizer.py`).
"""

from collections.abc import Mapping, Sequence

import structlog

from rollgrad.domain.errors import UntrainedParameterError

log = structlog.get_logger(__name__)

STEPS = 2
"""Steps in which a gradient may be 0 everywhere once: matrices behind one that starts at 0 (LoRA's A behind B, a critic
behind its head) get another one in the second step."""

SHOWN = 5
"""Names in a message."""


class GradientProof:
    """Looks at the gradients of the first steps.

    Args:
        names: of the parameters that are trained.
        tells: whether this is the process that logs what all of them see.
    """

    def __init__(self, names: Sequence[str], *, tells: bool = True) -> None:
        self._total = len(names)
        self._still = set(names)
        self._tells = tells
        self._steps = 0

    @property
    def under_way(self) -> bool:
        """Whether there is something left to prove."""
        return bool(self._still) and self._steps < STEPS

    def look(self, sizes: Mapping[str, float]) -> None:
        """Before a step: `sizes` are the largest absolute entries of the gradients, finite, of whoever got one.

        An expert to which no token was sent may have none.

        Raises:
            UntrainedParameterError: another parameter got none.
        """
        missing = sorted(name for name in self._still if name not in sizes and not may_lack_gradient(name))
        if missing:
            raise UntrainedParameterError(
                f"{len(missing)} of {self._total} trainable parameters got no gradient ({_listed(missing)}), so that "
                "training would leave them as they are; the step was not applied. Name a model that computes with all "
                "of its weights by --actor.model_name_or_path (--critic.model_name_or_path), or train layers that "
                "take part by --actor.lora.rank and --actor.lora.target_modules."
            )
        if not any(sizes.values()):
            return  # nothing was to be learned: that says nothing of any parameter
        self._still = {name for name in self._still if not sizes.get(name)}
        self._steps += 1
        if self._tells and self._still and self._steps == STEPS:
            log.warning(
                "parameters whose gradients were 0 in every step so far",
                count=len(self._still),
                of=self._total,
                names=_listed(sorted(self._still)),
                steps=STEPS,
            )


def may_lack_gradient(name: str) -> bool:
    """Returns whether a parameter is an expert's, to which no token may have been sent."""
    return "experts" in name.split(".")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
