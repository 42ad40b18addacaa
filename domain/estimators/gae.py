"""Generalised advantage estimation."""

import torch

from rollgrad.domain.estimators.packing import action_lengths, to_tokens, whiten
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from rollgrad.domain.estimators.types import Advantages, EstimatorInput, EstimatorParams


def gae(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, V and A 0 after the end; returns A + V
    (Schulman et al. 2016, eq. 11 and 16); advantages are then whitened over the batch's action tokens.

    Raises:
        ValueError: `values_N` is missing.
    """
    if inputs.values_N is None:
        raise ValueError("gae needs values_N from a critic.")
    mask_N = inputs.action_mask_N
    values_A = inputs.values_N[mask_N]
    lengths_S = action_lengths(inputs)
    next_A = torch.cat([values_A[1:], values_A.new_zeros(1)])[: len(values_A)]
    next_A[lengths_S.cumsum(0)[lengths_S > 0] - 1] = 0.0
    rewards_A = inputs.rewards_N[mask_N] + inputs.token_rewards_N[mask_N]
    delta_A = rewards_A + params.gamma * next_A - values_A
    advantages_A = reverse_discounted_sum(delta_A, lengths_S, params.gamma * params.lambd)
    return Advantages(
        advantages_N=to_tokens(whiten(advantages_A, std_norm=params.std_norm), mask_N),
        returns_N=to_tokens(advantages_A + values_A, mask_N),
    )
