"""Estimators that compare the rollouts of one prompt with each other.

A rollout's outcome is the sum of its rewards over all its turns and branches; it counts once in its group, however
many branches it has. The outcome's advantage goes to every action token of the rollout; rewards per token (the KL
penalty) add their undiscounted sum from that token to the rollout's end. A group of one rollout has nothing to compare:
advantage 0.
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams
from rollgrad.domain.batches.by_sequence import nonzero, spread
from rollgrad.domain.errors import RewardError

STD_FLOOR = 1e-9
"""Added to a group's standard deviation, as in OpenRLHF's group_norm."""


@estimator("reinforce_baseline")
def reinforce_baseline(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """REINFORCE++-baseline: r_i - mean(group), plus KL (Hu 2025, section 3; whitened over the batch)."""
    return dr_grpo(inputs, params)


@estimator("rloo")
def rloo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i minus the mean of the others (Ahmadian et al. 2024, eq. 8): (r_i - mean) n / (n - 1); KL stays per token."""
    rollouts = Rollouts(inputs)
    return broadcast(inputs, rollouts.leave_one_out(rollouts.outcome_R), rollouts)


@estimator("rloo_sequence")
def rloo_sequence(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """RLOO whose outcome is the reward minus the whole rollout's KL penalty, as in the paper's bandit form (Ahmadian et
    al. 2024, section 2.1 and eq. 8): KL enters before the baseline."""
    rollouts = Rollouts(inputs)
    penalised_R = rollouts.outcome_R + rollouts.sum_of(inputs.token_rewards_N)
    advantages_N = rollouts.at_actions(rollouts.leave_one_out(penalised_R))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)


@estimator("group_norm")
def group_norm(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GRPO: (r_i - mean) / (std + 1e-9) with the unbiased standard deviation (Shao et al. 2024, section 4.1.2)."""
    rollouts = Rollouts(inputs)
    return broadcast(inputs, rollouts.normalised(rollouts.outcome_R, rollouts.size_R), rollouts)


@estimator("dr_grpo")
def dr_grpo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i - mean(group), no standard deviation (Liu et al. 2025, "Understanding R1-Zero", section 3.2)."""
    rollouts = Rollouts(inputs)
    return broadcast(inputs, rollouts.centred(rollouts.outcome_R), rollouts)


@estimator("lite_ppo")
def lite_ppo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """(r_i - mean(group)) / (std + 1e-9) with the unbiased standard deviation of all rewards of the batch, so that a
    group of nearly equal rewards teaches little (Liu et al. 2025, "Tricks or Traps?", arXiv:2508.08221, Lite PPO)."""
    rollouts = Rollouts(inputs)
    batch_R = rollouts.outcome_R - rollouts.outcome_R.mean()
    std = (batch_R.square().sum() / max(1, len(batch_R) - 1)).sqrt()
    centred_R = rollouts.centred(rollouts.outcome_R)
    scaled_R = torch.where(rollouts.has_spread(rollouts.outcome_R, rollouts.size_R), centred_R / (std + STD_FLOOR), 0.0)
    return broadcast(inputs, scaled_R, rollouts)


@estimator("opo")
def opo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i minus the variance-optimal baseline sum(l r) / sum(l), l the action tokens of a rollout (Hao et al. 2025,
    "On-Policy RL with Optimal Reward Baseline", eq. 8)."""
    rollouts = Rollouts(inputs)
    lengths_R = rollouts.actions.lengths_R.double()
    baseline_R = rollouts.group_sum(lengths_R * rollouts.outcome_R) / rollouts.group_sum(lengths_R).clamp(min=1)
    return broadcast(inputs, rollouts.outcome_R - baseline_R, rollouts)


@estimator("gpg")
def gpg(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """alpha (r_i - mean), alpha = rollouts / rollouts of groups whose rewards differ, so that groups that teach nothing
    do not dilute the gradient (Chu et al. 2025, "GPG", eq. 9 to 11 with F_norm = 1)."""
    rollouts = Rollouts(inputs)
    useful = rollouts.has_spread(rollouts.outcome_R, rollouts.size_R).sum()
    alpha = len(rollouts.outcome_R) / useful.clamp(min=1).double()
    return broadcast(inputs, alpha * rollouts.centred(rollouts.outcome_R), rollouts)


@estimator("maxrl")
def maxrl(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """(r_i - mean) / mean for rewards of at least 0, and 0 where the mean is 0. This is the gradient of the log of the
    pass rate, truncated at the group's size (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    Raises:
        RewardError: an outcome is below 0.
    """
    rollouts = Rollouts(inputs)
    # Rewards of turns that cancel leave a rounding error, which is neither a reward nor an outcome below 0.
    rewards_R = torch.where(rollouts.outcome_R.abs() <= SAME * rollouts.size_R, 0.0, rollouts.outcome_R)
    if bool((rewards_R < 0).any()):
        raise RewardError(
            "algo.advantage.estimator maxrl divides by the mean reward of a prompt's samples, so that no reward may be "
            f"below 0, but that of an episode is {float(rewards_R.min()):g}: give rewards of at least 0, set "
            "--reward.clip_range with a lower bound of 0, or set --algo.advantage.estimator to group_norm."
        )
    mean_R = rollouts.group_sum(rewards_R) / rollouts.count_R
    positive_R = torch.where(mean_R == 0, 1.0, mean_R)
    return broadcast(inputs, rollouts.centred(rewards_R) / positive_R, rollouts)


@estimator("gdpo")
def gdpo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """Each named reward normalised apart within the group, summed by weight, then normalised over the batch's rollouts
    (Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", eq. 4 to 7).

    Raises:
        ValueError: `reward_parts_SK` or `part_weights_K` is missing.
    """
    if inputs.reward_parts_SK is None or inputs.part_weights_K is None:
        raise ValueError("gdpo needs reward_parts_SK and part_weights_K: rewards in named parts.")
    rollouts = Rollouts(inputs)
    total_R = torch.zeros_like(rollouts.outcome_R)
    for part_S, weight in zip(inputs.reward_parts_SK.double().unbind(1), inputs.part_weights_K, strict=True):
        part_R = torch.zeros_like(total_R).index_add_(0, rollouts.actions.rollout_S, part_S)
        size_R = torch.zeros_like(total_R).index_add_(0, rollouts.actions.rollout_S, part_S.abs())
        total_R += weight.double() * rollouts.normalised(part_R, size_R)
    centred_R = total_R - total_R.mean()
    std = (centred_R.square().sum() / max(1, len(centred_R) - 1)).sqrt()
    return broadcast(inputs, centred_R / (std + STD_FLOOR), rollouts)


class Rollouts:
    """Outcomes of rollouts (R), and their comparison within groups; each [R], in float64.

    In float32 the mean of equal rewards can miss them by a rounding error, which division by a standard deviation of
    the same size would blow up to 1. `size_R` sums the absolute values of the rewards that `outcome_R` sums: rounding
    errors are relative to it. NaN stays NaN."""

    def __init__(self, inputs: EstimatorInput) -> None:
        self.actions = Actions(inputs)
        self.group_R = self.actions.group_R
        self._dtype = inputs.rewards_N.dtype
        index, sequences = nonzero(inputs.rewards_N, inputs.lengths_S, inputs.action_mask_N)
        rollouts, rewards = self.actions.rollout_S[sequences], inputs.rewards_N[index].double()
        self.outcome_R = rewards.new_zeros(len(self.group_R)).index_add_(0, rollouts, rewards)
        self.size_R = torch.zeros_like(self.outcome_R).index_add_(0, rollouts, rewards.abs())
        self.count_R = self.group_sum(torch.ones_like(self.outcome_R))

    def sum_of(self, values_N: Tensor) -> Tensor:
        """Returns each rollout's total over its action tokens."""
        values_A = self.actions.take(values_N).double()
        return values_A.new_zeros(len(self.group_R)).index_add_(0, self.actions.rollout_A, values_A)

    def group_sum(self, values_R: Tensor) -> Tensor:
        """Returns each rollout's group total."""
        return values_R.new_zeros(len(values_R)).index_add_(0, self.group_R, values_R)[self.group_R]

    def centred(self, values_R: Tensor) -> Tensor:
        """Returns the values minus their group's mean."""
        return values_R - self.group_sum(values_R) / self.count_R

    def leave_one_out(self, values_R: Tensor) -> Tensor:
        """Returns the values minus the mean of the group's others."""
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1); a group of one has r - mean = 0, whatever the factor is.
        return self.centred(values_R) * self.count_R / (self.count_R - 1).clamp(min=1)

    def normalised(self, values_R: Tensor, size_R: Tensor) -> Tensor:
        """Returns values minus their group's mean, divided by its unbiased standard deviation; 0 in a group without
        spread."""
        centred_R = self.centred(values_R)
        std_R = (self.group_sum(centred_R.square()) / (self.count_R - 1).clamp(min=1)).sqrt()
        return torch.where(self.has_spread(values_R, size_R), centred_R / (std_R + STD_FLOOR), 0.0)

    def has_spread(self, values_R: Tensor, size_R: Tensor) -> Tensor:
        """Returns, for each rollout, whether its group's values differ by more than the rounding error of its
        largest."""
        low, high, size = (
            torch.zeros_like(values_R).scatter_reduce(0, self.group_R, column_R, reduce, include_self=False)
            for column_R, reduce in ((values_R, "amin"), (values_R, "amax"), (size_R, "amax"))
        )
        return ~(high - low <= SAME * size)[self.group_R]  # true for NaN

    def at_actions(self, values_R: Tensor) -> Tensor:
        """Returns the rollout's value at each of its action tokens, [N], in the rewards' dtype; 0 elsewhere."""
        inputs = self.actions.inputs
        values_S = values_R.to(self._dtype)[self.actions.rollout_S]
        return spread(values_S, inputs.lengths_S, inputs.action_mask_N)


def broadcast(inputs: EstimatorInput, outcome_R: Tensor, rollouts: Rollouts) -> Advantages:
    """Returns each rollout's advantage at all its action tokens, plus the sum of the token rewards from there on."""
    actions = rollouts.actions
    advantages_N = rollouts.at_actions(outcome_R)
    if bool(inputs.token_rewards_N.any()):  # without a KL penalty there are none
        token_rewards_A = actions.take(inputs.token_rewards_N)
        advantages_N += actions.put(reverse_discounted_sum(token_rewards_A, actions.lengths_R, 1.0))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
