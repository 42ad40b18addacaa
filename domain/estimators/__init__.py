"""Rewards to advantages: one table from name to function. The contract is in `types`."""

from rollgrad.domain.estimators.gae import gae
from rollgrad.domain.estimators.group import dr_grpo, group_norm, reinforce_baseline, rloo
from rollgrad.domain.estimators.reinforce import reinforce
from rollgrad.domain.estimators.types import Advantages, Estimator, EstimatorInput, EstimatorParams

ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "rloo": rloo,
    "group_norm": group_norm,
    "dr_grpo": dr_grpo,
}
"""The names that `--algo.advantage.estimator` takes."""

__all__ = ["ESTIMATORS", "Advantages", "Estimator", "EstimatorInput", "EstimatorParams"]
