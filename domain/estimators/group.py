"""Estimators that compare the rollouts of one prompt with each other.

A rollout's outcome is the sum of its rewards over all its turns and branches; it counts once in its group, however
many branches it has. The outcome's advantage goes to every action token of the rollout; rewards per token (the KL
penalty) add their undiscounted sum from that token on. A group of one rollout has nothing to compare: advantage 0.
"""

import torch
from torch import Tensor

from rollgrad.domain.estimators.packing import action_lengths, sequence_ids, to_tokens, whiten
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from rollgrad.domain.estimators.types import Advantages, EstimatorInput, EstimatorParams

STD_FLOOR = 1e-9
"""Added to a group's standard deviation, as in OpenRLHF's group_norm."""


def reinforce_baseline(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """REINFORCE++-baseline: r_i - mean(group), plus KL, whitened over the batch (Hu 2025, section 3)."""
    groups = _Groups(inputs)
    return _broadcast(inputs, groups.outcome_R - groups.mean_R, groups, whitening=True, std_norm=params.std_norm)


def rloo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i minus the mean of the others (Ahmadian et al. 2024, eq. 8): (r_i - mean) n / (n - 1)."""
    groups = _Groups(inputs)
    scale_R = groups.count_R / (groups.count_R - 1).clamp(min=1)
    return _broadcast(inputs, (groups.outcome_R - groups.mean_R) * scale_R, groups)


def group_norm(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GRPO: (r_i - mean) / (std + 1e-9) with the unbiased standard deviation (Shao et al. 2024, section 4.1.2)."""
    groups = _Groups(inputs)
    return _broadcast(inputs, (groups.outcome_R - groups.mean_R) / (groups.std_R + STD_FLOOR), groups)


def dr_grpo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i - mean(group), no standard deviation (Liu et al. 2025, "Understanding R1-Zero", section 3.2)."""
    groups = _Groups(inputs)
    return _broadcast(inputs, groups.outcome_R - groups.mean_R, groups)


class _Groups:
    """Outcomes of rollouts (R) and their groups' statistics, each [R], in float64: in float32 the mean of equal
    rewards can miss them by a rounding error, which a standard deviation of the same size would blow up to 1."""

    def __init__(self, inputs: EstimatorInput) -> None:
        keys = torch.stack([inputs.group_ids_S, inputs.sample_ids_S], dim=1)
        rollouts, self.rollout_S = torch.unique(keys, dim=0, return_inverse=True)
        rewards_N = torch.where(inputs.action_mask_N, inputs.rewards_N, 0.0).double()
        self.outcome_R = rewards_N.new_zeros(len(rollouts)).index_add_(
            0, self.rollout_S[sequence_ids(inputs.lengths_S)], rewards_N
        )
        _, group_R = torch.unique(rollouts[:, 0], return_inverse=True)
        self.count_R = self._sum(torch.ones_like(self.outcome_R), group_R)
        self.mean_R = self._sum(self.outcome_R, group_R) / self.count_R
        squares_R = self._sum((self.outcome_R - self.mean_R).square(), group_R)
        self.std_R = (squares_R / (self.count_R - 1).clamp(min=1)).sqrt()

    @staticmethod
    def _sum(values_R: Tensor, group_R: Tensor) -> Tensor:
        """Each rollout's group total."""
        return values_R.new_zeros(len(values_R)).index_add_(0, group_R, values_R)[group_R]


def _broadcast(
    inputs: EstimatorInput, outcome_R: Tensor, groups: _Groups, *, whitening: bool = False, std_norm: bool = True
) -> Advantages:
    """Outcome advantages on every action token, plus the token rewards still to come."""
    mask_N = inputs.action_mask_N
    outcome_A = outcome_R.to(inputs.rewards_N.dtype)[groups.rollout_S[sequence_ids(inputs.lengths_S)]][mask_N]
    returns_A = outcome_A + reverse_discounted_sum(inputs.token_rewards_N[mask_N], action_lengths(inputs), 1.0)
    advantages_A = whiten(returns_A, std_norm=std_norm) if whitening else returns_A
    return Advantages(advantages_N=to_tokens(advantages_A, mask_N), returns_N=to_tokens(returns_A, mask_N))
