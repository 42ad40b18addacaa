"""Rewards to advantages: one table from name to function, and `estimate`, which whitens what a function returns. The
contract is in `types`."""

from attrs import evolve

from rollgrad.domain.catalogue import estimator_traits
from rollgrad.domain.estimators import distill, gae, group, reinforce, turn
from rollgrad.domain.estimators.packing import sequence_ids, to_tokens, whiten_over
from rollgrad.domain.estimators.registry import ESTIMATORS, estimator
from rollgrad.domain.estimators.types import Advantages, Estimator, EstimatorInput, EstimatorParams


def estimate(
    name: str, inputs: EstimatorInput, params: EstimatorParams, *, whiten: str | None = None, std_norm: bool = True
) -> Advantages:
    """Advantages of estimator `name`, whitened over action tokens; the critic's targets never are.

    Args:
        name: key of `ESTIMATORS`.
        whiten: from `catalogue.WHITENINGS`; None takes the estimator's own.
        std_norm: divide by the standard deviation too; without it only the mean is subtracted.

    Raises:
        ConfigurationError: unknown `name`.
        ValueError: an input that the estimator needs is missing.
    """
    over = whiten or estimator_traits(name).whiten
    result = ESTIMATORS[name](inputs, params)
    if over == "none":
        return result
    mask_N = inputs.action_mask_N
    groups_A = inputs.group_ids_S[sequence_ids(inputs.lengths_S)][mask_N] if over == "group" else None
    whitened_A = whiten_over(result.advantages_N[mask_N], groups_A, std_norm=std_norm)
    return evolve(result, advantages_N=to_tokens(whitened_A, mask_N))


__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimator",
    "EstimatorInput",
    "EstimatorParams",
    "distill",
    "estimate",
    "estimator",
    "gae",
    "group",
    "reinforce",
    "turn",
]
