"""Settings of recomputation with which a run that does not fit would: importable without torch."""

from collections.abc import Callable

from attrs import evolve

from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import WHERE_IT_SELECTS, Checkpointing

WAYS_OUT = (
    (Checkpointing.SELECTIVE, False),
    (Checkpointing.FULL, False),
    (Checkpointing.FULL, True),
)
"""Settings of recomputation, and of inputs in the machine's memory, that make room on a device, the fastest first."""


def way_out(config: RLConfig, machine: Machine, fits: Callable[[RLConfig], bool]) -> str | None:
    """Returns a sentence with the settings of recomputation, those that cost least first, by which a run that does not
    fit would fit, as `fits` says of other settings; None if there are none."""
    for kind, offloads in WAYS_OUT:
        stronger = evolve(config.actor, gradient_checkpointing=kind, offload_activations=offloads)
        selects = kind is Checkpointing.SELECTIVE
        refused = selects and not all(condition.holds(stronger, config) for condition in WHERE_IT_SELECTS)
        if refused or (offloads and not machine.gpu):
            continue
        if fits(evolve(config, actor=stronger)):
            moved = " --actor.offload_activations true" if offloads else ""
            return f"It would fit with --actor.gradient_checkpointing {kind}{moved}."
    return None
