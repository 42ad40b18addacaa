"""Tells of settings of an optimizer by which the weights of a run stay as they are. Pure."""

from typing import Any

from rollgrad.application.settings.sections.optimizer import Optim
from rollgrad.domain.algorithms.catalogue import estimator_traits

NO_LR = 1e-10
"""Learning rate up to which Adam moves no weight of a usual size (0.01) by more than float32 rounds it."""


def still_sentences(run: Any) -> list[str]:
    """Returns a sentence for each setting by which the actor of a run of any kind, or its critic, learns nothing."""
    names = ["actor"]
    if hasattr(run, "critic") and "critic" in estimator_traits(run.algo.advantage.estimator).needs:
        names.append("critic")
    return [sentence for name in names for sentence in _of(name, getattr(run, name))]


def _of(name: str, section: Any) -> list[str]:
    if section.optim is Optim.MUON:  # whose steps have the length of its own rate, whatever the gradient's
        return []
    found = []
    if section.peak_lr <= NO_LR:
        found.append(
            f"{name}.adam.lr is {section.peak_lr:g}, with which the weights stay as they are: raise --{name}.adam.lr "
            "to learn."
        )
    if section.optim_path is None and 0 < section.max_norm <= section.adam.eps:
        found.append(
            f"{name}.max_norm is {section.max_norm:g}, which scales each gradient down below {name}.adam.eps "
            f"({section.adam.eps:g}), so that the weights stay as they are: raise --{name}.max_norm; 0 turns clipping "
            "off."
        )
    return found
