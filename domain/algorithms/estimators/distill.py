"""Estimators that learn from a teacher's log-probs alone."""

import torch

from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("on_policy_distill")
def on_policy_distill(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """A_t = -coef (log p_student - log p_teacher) of the sampled token. This is the per-token reverse KL penalty by
    itself, neither summed over time nor mixed with a reward (Agarwal et al. 2024, "On-Policy Distillation of Language
    Models", section 3; as a policy-gradient advantage: Thinking Machines 2025, "On-Policy Distillation")."""
    actions = Actions(inputs)
    advantages_N = actions.put(actions.take(inputs.token_rewards_N))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)


@estimator("iw_opd")
def iw_opd(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """The advantage of `on_policy_distill` times 1 + w (1 - D_t / D), with w the `prefix_weight`.

    D_t is the sum of the advantage's absolute values before token t, and D that of the whole rollout. Early tokens
    count up to 1 + w times; later ones count less, the further the student has moved away from its teacher (Xie et al.
    2026, "On the Position Bias of On-Policy Distillation", arXiv:2606.22600, as in TRL's IWOPDTrainer).
    """
    actions = Actions(inputs)
    plain_A = actions.take(inputs.token_rewards_N)
    togo_A = reverse_discounted_sum(plain_A.abs().double(), actions.lengths_R, 1.0)  # D - D_t
    total_R = togo_A.new_zeros(len(actions.lengths_R)).scatter_reduce(0, actions.rollout_A, togo_A, "amax")
    total_A = total_R[actions.rollout_A]
    share_A = torch.where(total_A > 0, togo_A / total_A, 0.0)
    advantages_N = actions.put(plain_A * (1 + params.prefix_weight * share_A).to(plain_A.dtype))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
