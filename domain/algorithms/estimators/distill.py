"""Estimator that learns from a teacher's log-probs alone."""

from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("on_policy_distill")
def on_policy_distill(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """A_t = -coef (log p_student - log p_teacher) of the sampled token: the per-token reverse KL penalty by itself,
    neither summed over time nor mixed with a reward (Agarwal et al. 2024, "On-Policy Distillation of Language Models",
    section 3; as a policy-gradient advantage: Thinking Machines 2025, "On-Policy Distillation")."""
    actions = Actions(inputs)
    advantages_N = actions.put(actions.take(inputs.token_rewards_N))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
