"""REINFORCE++: discounted returns, whitened over the whole batch."""

from rollgrad.domain.estimators.packing import action_lengths, to_tokens, whiten
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from rollgrad.domain.estimators.types import Advantages, EstimatorInput, EstimatorParams


def reinforce(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """A_t = G_t = r_t + gamma G_{t+1} with the KL penalty in each token's reward, whitened over the batch's action
    tokens (Hu 2025, "REINFORCE++", section 3)."""
    mask_N = inputs.action_mask_N
    rewards_A = inputs.rewards_N[mask_N] + inputs.token_rewards_N[mask_N]
    returns_A = reverse_discounted_sum(rewards_A, action_lengths(inputs), params.gamma)
    return Advantages(
        advantages_N=to_tokens(whiten(returns_A, std_norm=params.std_norm), mask_N),
        returns_N=to_tokens(returns_A, mask_N),
    )
