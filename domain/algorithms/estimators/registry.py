"""The table of estimators, and the decorator that adds to it."""

from collections.abc import Callable

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import EstimatorTraits
from rollgrad.domain.algorithms.estimators.types import Estimator

ESTIMATORS: dict[str, Estimator] = {}
"""Functions by name; `catalogue.ESTIMATORS` has their traits."""


def estimator(name: str, traits: EstimatorTraits | None = None) -> Callable[[Estimator], Estimator]:
    """Registers a function as the estimator `name`, replacing one of that name.

    `traits`: its needs and settings; None keeps those that the catalogue has for the name, if any.

    >>> from rollgrad.domain.algorithms.estimators import ESTIMATORS, Advantages
    >>> @estimator("reward_to_all", EstimatorTraits(whiten="batch"))
    ... def reward_to_all(inputs, params):
    ...     return Advantages(advantages_N=inputs.rewards_N, returns_N=inputs.rewards_N)
    >>> ESTIMATORS.pop("reward_to_all") is reward_to_all
    True
    >>> _ = catalogue.ESTIMATORS.pop("reward_to_all")
    """

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        if traits is not None or name not in catalogue.ESTIMATORS:
            catalogue.ESTIMATORS[name] = traits or EstimatorTraits()
        return function

    return register
