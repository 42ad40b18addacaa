"""The table of estimators, and the decorator that adds to it."""

from collections.abc import Callable
from typing import Any

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import EstimatorTraits
from rollgrad.domain.algorithms.estimators.types import Estimator

ESTIMATORS: dict[str, Estimator] = {}
"""Functions by name; `catalogue.ESTIMATORS` has their traits."""


def estimator(
    name: str, traits: EstimatorTraits | None = None, *, settings: type[Any] | None = None
) -> Callable[[Estimator], Estimator]:
    """Registers a function as the estimator `name`, replacing one of that name.

    `traits`: what it needs and reads; None keeps those that the catalogue has for the name, if any. `settings`: class
    of settings of its own, made by `rollgrad.setting`; the function takes them third, and users set them as
    `algo.estimators.NAME.SETTING`.

    >>> from rollgrad.domain.algorithms.estimators import ESTIMATORS, Advantages
    >>> @estimator("reward_to_all", EstimatorTraits(whiten="batch"))
    ... def reward_to_all(inputs, params):
    ...     return Advantages(advantages_N=inputs.rewards_N, returns_N=inputs.rewards_N)
    >>> ESTIMATORS.pop("reward_to_all") is reward_to_all
    True
    >>> _ = catalogue.ESTIMATORS.pop("reward_to_all")
    """

    def register(function: Estimator) -> Estimator:
        known = traits or catalogue.ESTIMATORS.get(name, EstimatorTraits())
        catalogue.ESTIMATORS[name] = catalogue.with_settings(known, name, settings)
        ESTIMATORS[name] = function
        return function

    return register
