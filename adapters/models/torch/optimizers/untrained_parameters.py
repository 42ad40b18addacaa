"""Proof that an optimizer reaches every parameter that it was given.

A parameter without effect on the model's output gets no gradient and never changes, while loss and gradient norm look
normal. Does not own: gradients that are not finite (`optimizer.py`).
"""

from collections.abc import Mapping, Sequence

import structlog

from rollgrad.domain.errors import UntrainedParameterError

log = structlog.get_logger(__name__)

STEPS = 2
"""Steps that are checked. A gradient may be 0 in the first, if a matrix after the parameter starts at 0 (LoRA's B after
A, a critic's head after its body); it must not be 0 in the second."""

OPTIONAL = frozenset(
    {
        "experts",
        *("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower"),
        *("connector", "multi_modal_projector", "image_newline"),
        *("vision_embed_tokens", "visual_projection", "embed_tokens_extend"),
        "compressor",
    }
)
"""Names of parts that take no part in every step: experts, transformers' names of what images and sounds go through,
and DeepSeek-V4's compressors, which begin at 128 tokens and choose what is attended to without a gradient."""

SHOWN = 5
"""Largest number of names in a message."""


class GradientProof:
    """Checks the gradients of the first steps.

    Args:
        names: names of the parameters that are trained.
        tells: whether this process logs for all of them.
    """

    def __init__(self, names: Sequence[str], *, tells: bool = True) -> None:
        self._total = len(names)
        self._still = set(names)
        self._tells = tells
        self._steps = 0

    @property
    def under_way(self) -> bool:
        """Whether there are parameters left to check."""
        return bool(self._still) and self._steps < STEPS

    def look(self, sizes: Mapping[str, float]) -> None:
        """Checks the gradients before a step; `sizes` are their largest absolute entries, finite, of parameters with
        one.

        An expert to which no token was sent may have no gradient, nor may other parts of which a step may make no use.

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
            return  # nothing was to be learned, which says nothing about a parameter
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
    """Returns whether a step may make no use of a parameter: of an expert to which no token was sent, or of what images
    go through (some models also leave the last layers of the tower out)."""
    return not OPTIONAL.isdisjoint(name.split("."))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
