"""Settings with which a run that does not fit would: importable without torch."""

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from rollgrad.application.settings.engine_memory import engines_sleep
from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import WHERE_IT_SELECTS, Checkpointing
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import PARAMETERS

WAYS_OUT = (
    (Checkpointing.SELECTIVE, False),
    (Checkpointing.FULL, False),
    (Checkpointing.FULL, True),
)
"""Settings of recomputation, and of inputs in the machine's memory, that make room on a device, the fastest first."""


def way_out(config: RLConfig, machine: Machine, fits: Callable[[RLConfig], bool]) -> str | None:
    """Returns a sentence with the settings by which a run that does not fit would fit; None if there are none.

    Settings that cost least are tried first: recomputation, then frozen models in the machine's memory, then what is
    divided (weights, then sequences), sleeps or is offloaded. Each is tried alone and with those before it, except for
    the division of sequences: it is tried before what sleeps, left out there, and tried again last.

    Args:
        config: settings of the run.
        machine: machine that the run is planned for.
        fits: returns whether a run with these settings would fit.
    """
    for divided, flags in _divided(config, machine):
        for resting, rests in _resting(divided):
            for changed, more in _recomputing(resting, machine):
                words = " ".join([*flags, *rests, *more])
                if words and fits(changed):
                    return f"It would fit with {words}."
    return None


def _resting(config: RLConfig) -> Iterator[tuple[RLConfig, list[str]]]:
    """Yields the settings, and variants whose frozen models rest in the machine's memory, each with its changed flags.
    Variants that rules refuse are left out, such as those of a model that the run does not have."""
    refused = set(map(str, setting_errors(config)))
    for names in ((), ("ref",), ("reward",), ("ref", "reward")):
        rests: dict[str, Any] = {name: evolve(getattr(config, name), offload=True) for name in names}
        changed = evolve(config, **rests)
        if not names or refused.issuperset(map(str, setting_errors(changed))):
            yield changed, [f"--{name}.offload" for name in names]


def _recomputing(config: RLConfig, machine: Machine) -> Iterator[tuple[RLConfig, list[str]]]:
    """Yields the settings, and variants with more recomputation, each with its changed flags."""
    yield config, []
    for kind, offloads in WAYS_OUT:
        stronger = evolve(config.actor, gradient_checkpointing=kind, offload_activations=offloads)
        selects = kind is Checkpointing.SELECTIVE
        refused = selects and not all(condition.holds(stronger, config) for condition in WHERE_IT_SELECTS)
        if refused or (offloads and not machine.gpu):
            continue
        moved = ["--actor.offload_activations true"] if offloads else []
        yield evolve(config, actor=stronger), [f"--actor.gradient_checkpointing {kind}", *moved]


def _divided(config: RLConfig, machine: Machine) -> Iterator[tuple[RLConfig, list[str]]]:
    """Yields the settings, and variants of a cluster whose GPUs hold less of the models that are trained, each with its
    changed flags."""
    yield config, []
    if not config.cluster.enable:
        return
    flags, train = [], config.train
    offload, section = "adam_offload", "ds"
    if config.cluster.strategy is Strategy.FSDP2:
        offload, section = "offload", "cluster"
    elif config.ds.zero_stage < PARAMETERS:
        config, flags = evolve(config, ds=evolve(config.ds, zero_stage=PARAMETERS)), ["--ds.zero_stage 3"]
        yield config, flags
    yield from _sharing_sequences(config, flags)
    if not machine.gpu or getattr(getattr(config, section), offload):
        return
    if engines_sleep(config) and not train.optimizer_sleeps:
        yield evolve(config, train=evolve(train, optimizer_sleeps=True)), [*flags, "--train.optimizer_sleeps"]
    moved = evolve(getattr(config, section), **{offload: True})
    awake = [] if not train.optimizer_sleeps else ["--train.optimizer_sleeps false"]
    changed = evolve(config, train=evolve(train, optimizer_sleeps=False), **{section: moved})
    flags = [*flags, *awake, f"--{section}.{offload}"]
    yield changed, flags
    yield from _sharing_sequences(changed, flags)


def _sharing_sequences(config: RLConfig, flags: list[str]) -> Iterator[tuple[RLConfig, list[str]]]:
    """Yields variants in which more processes of a machine share each sequence, fewest first, each with `flags` and its
    own. Variants that rules refuse are left out."""
    refused = set(map(str, setting_errors(config)))
    size = 2 * config.ds.sequence_parallel_size
    while size <= config.actor.num_gpus_per_node:
        changed = evolve(config, ds=evolve(config.ds, sequence_parallel_size=size))
        if refused.issuperset(map(str, setting_errors(changed))):
            yield changed, [*flags, f"--ds.sequence_parallel_size {size}"]
        size *= 2
