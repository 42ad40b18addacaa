"""Loads optimizers and schedules of the learning rate that a user's settings name.

Does not own: how they are used (`adapters/models/torch/own_optimizer`).
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from rollgrad.adapters.models.torch.optimizers.own_optimizer import OwnOptimizer
from rollgrad.adapters.system.python_file import load_python
from rollgrad.application.foreign import foreign_code, shown
from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.domain.errors import ConfigurationError, RollgradError, raise_together

TRIAL_STEPS = 100
"""Optimizer steps for which a schedule is tried before the length of the run is known."""


def load_schedule(path: str | None, total_steps: int, flag: str) -> tuple[float, ...] | None:
    """Returns the learning rates of `total_steps` optimizer steps, as shares of the peak, that the function at `path`
    gives; None where none is named. Each process of a model asks for itself.

    Raises:
        ConfigurationError: there is no such function, or it failed, or gives something other than such shares, or
            others when it is asked again.
    """
    if path is None:
        return None
    function = _load(path, "lr_scheduler", flag)
    factors = tuple(_factor(function, step, total_steps, f"{flag} {path}") for step in range(max(1, total_steps)))
    if _factor(function, 0, total_steps, f"{flag} {path}") != factors[0]:
        raise ConfigurationError(
            f"{flag} {path} gives another learning rate when it is asked again for step 0: let it depend on step and "
            "total_steps alone."
        )
    return factors


def load_optim(path: str | None, flag: str) -> OwnOptimizer | None:
    """Returns the optimizer that a user names; None where none is named.

    Raises:
        ConfigurationError: there is none.
    """
    return None if path is None else OwnOptimizer(_load(path, "optim", flag), f"{flag} {path}")


def check_own_optimizers(config: Any) -> None:
    """Checks the optimizers and schedules of a run's models, before anything is loaded.

    Raises:
        ConfigurationError: what is wrong with them; all problems together.
    """
    problems: list[RollgradError] = []
    for model in ("actor", "critic"):
        section = getattr(config, model, None)
        if section is None:
            continue
        try:
            load_schedule(section.lr_scheduler_path, TRIAL_STEPS, f"--{model}.lr_scheduler_path")
        except RollgradError as error:
            problems.append(error)
        try:
            own = load_optim(section.optim_path, f"--{model}.optim_path")
        except RollgradError as error:
            problems.append(error)
            continue
        if own is not None and config.cluster.enable and not own.elementwise:
            problems.append(
                ConfigurationError(
                    f"{own.setting} does not say that it steps each number by itself, but with cluster.enable "
                    "processes have rows of matrices: set its attribute elementwise to True if it does, or leave "
                    "--cluster.enable out."
                )
            )
    raise_together(problems)


def _load(path: str, usual: str, flag: str) -> Callable[..., Any]:
    place = FunctionPath.parse(path)
    name = place.name or usual
    function: Any = getattr(load_python(place.file, flag=flag), name, None)
    if not callable(function):
        raise ConfigurationError(f"{flag} {path} defines no {name}: name a function with {flag} {place.file}:NAME.")
    called: Callable[..., Any] = function
    return called


def _factor(function: Callable[..., Any], step: int, total_steps: int, who: str) -> float:
    with foreign_code(lambda words: ConfigurationError(f"{who} failed at step {step}: {words}"), located=True):
        value = function(step, total_steps)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            f"{who} gives {shown(value)} at step {step} of {total_steps}: return the share of the peak learning rate, "
            "a number of at least 0."
        )
    return float(value)
