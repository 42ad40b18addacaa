"""Estimators from the return of a single rollout: REINFORCE++, FlashREINFORCE (minus the batch's mean) and ReMax."""

from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.group import Rollouts, broadcast
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("reinforce")
def reinforce(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """A_t = G_t = r_t + gamma G_{t+1} with the KL penalty in each token's reward (Hu 2025, "REINFORCE++", section 3;
    whitened over the batch's action tokens)."""
    actions = Actions(inputs)
    rewards_A = actions.take(inputs.rewards_N) + actions.take(inputs.token_rewards_N)
    returns_N = actions.put(reverse_discounted_sum(rewards_A, actions.lengths_R, params.gamma))
    return Advantages(advantages_N=returns_N, returns_N=returns_N)


@estimator("flash_reinforce")
def flash_reinforce(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i minus the mean over all rollouts of the batch, for one sample a prompt (FlashREINFORCE, the Molt project
    2026): the batch takes the place of the group, so a batch of one rollout teaches nothing."""
    rollouts = Rollouts(inputs)
    return broadcast(inputs, rollouts.outcome_R - rollouts.outcome_R.mean(), rollouts)


@estimator("remax")
def remax(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """r_i minus the reward of the same prompt's greedy rollout (Li et al. 2024, "ReMax", eq. 6).

    Raises:
        ValueError: `baselines_S` is missing.
    """
    if inputs.baselines_S is None:
        raise ValueError("remax needs baselines_S, the reward of each prompt's greedy rollout.")
    rollouts = Rollouts(inputs)
    baseline_R = rollouts.outcome_R.new_zeros(len(rollouts.outcome_R))
    baseline_R[rollouts.actions.rollout_S] = inputs.baselines_S.double()
    return broadcast(inputs, rollouts.outcome_R - baseline_R, rollouts)
