"""Estimators turn rewards into advantages. `ESTIMATORS` maps names to functions, whose contract is in `types`;
`estimate` calls one and whitens its result."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.columns import check_tokens
from rollgrad.domain.algorithms.estimators import best, distill, gae, group, reinforce, token_baseline, turn
from rollgrad.domain.algorithms.estimators.actions import Actions, whiten_over
from rollgrad.domain.algorithms.estimators.registry import ESTIMATORS, estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, Estimator, EstimatorInput, EstimatorParams


def estimate(
    name: str,
    inputs: EstimatorInput,
    params: EstimatorParams,
    *,
    whiten: str | None = None,
    std_norm: bool = True,
    settings: Any = None,
) -> Advantages:
    """Returns the advantages of estimator `name`, whitened over action tokens; the critic's targets are never whitened.
    Each role has the advantages that it would have if the others were not in the batch: a baseline, a deviation and a
    whitening of its own (as the role-conditioned baseline of SPIRAL, Liu et al. 2025, arXiv:2506.24119). The metrics of
    several roles end with `/ROLE`.

    Args:
        name: key of `ESTIMATORS`.
        whiten: a name of `catalogue.WHITENINGS`; None takes the estimator's own.
        std_norm: divide by the standard deviation too; without it only the mean is subtracted.
        settings: settings of the estimator's own; None takes their defaults.

    Raises:
        ConfigurationError: unknown `name`, or a result without a value for each token.
        ValueError: an input that the estimator needs is missing.
    """
    if inputs.roles_S is not None:
        return _of_roles(name, inputs, inputs.roles_S, params, whiten=whiten, std_norm=std_norm, settings=settings)
    traits = estimator_traits(name)
    over = whiten or traits.whiten
    result = ESTIMATORS[name](inputs, params, *traits.own(settings))
    for column in ("advantages_N", "returns_N"):
        check_tokens(f"The estimator {name}", column, getattr(result, column), inputs.action_mask_N)
    if over == "none":
        return result
    actions = Actions(inputs)
    groups_A = None
    if over == "group":
        groups_A = actions.group_R[actions.rollout_A]
    whitened_A = whiten_over(actions.take(result.advantages_N), groups_A, std_norm=std_norm)
    return evolve(result, advantages_N=actions.put(whitened_A))


def _of_roles(
    name: str, inputs: EstimatorInput, roles_S: Sequence[str], params: EstimatorParams, **options: Any
) -> Advantages:
    """Returns the advantages of each role apart, at its own tokens."""
    advantages_N, returns_N = torch.zeros_like(inputs.rewards_N), torch.zeros_like(inputs.rewards_N)
    metrics: dict[str, float] = {}
    for role in sorted(set(roles_S)):
        own, mine_N = inputs.of_role(role)
        found = estimate(name, own, params, **options)
        advantages_N[mine_N], returns_N[mine_N] = found.advantages_N, found.returns_N
        metrics |= {f"{key}/{role}": value for key, value in found.metrics.items()}
    return Advantages(advantages_N=advantages_N, returns_N=returns_N, metrics=metrics)


__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimator",
    "EstimatorInput",
    "EstimatorParams",
    "best",
    "distill",
    "estimate",
    "estimator",
    "gae",
    "group",
    "reinforce",
    "token_baseline",
    "turn",
]
