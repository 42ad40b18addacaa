"""Generalised advantage estimation per action token."""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.discounting import last_tokens, reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("gae")
def gae(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, V and A 0 after the end; returns A + V
    (Schulman et al. 2016, eq. 11 and 16).

    VAPO (Yue et al. 2025, section 4.1): `length_adaptive_alpha` sets lambda to 1 - 1 / (alpha l) for a rollout of l
    action tokens (eq. 6, at least 0), and `critic_lambd` gives the returns a lambda of their own (decoupled GAE).

    Raises:
        ValueError: `values_N` is missing.
    """
    if inputs.values_N is None:
        raise ValueError("gae needs values_N from a critic.")
    actions = Actions(inputs)
    values_A, lengths_R = actions.take(inputs.values_N), actions.lengths_R
    rewards_A = actions.take(inputs.rewards_N) + actions.take(inputs.token_rewards_N)
    delta_A = temporal_differences(rewards_A, values_A, lengths_R, params.gamma)
    lambd: float | Tensor = params.lambd
    if params.length_adaptive_alpha is not None:
        # A rollout without action tokens has length 0: the clamp keeps its lambda finite, though nothing uses it.
        lambd = (1.0 - 1.0 / (params.length_adaptive_alpha * lengths_R.double().clamp(min=1))).clamp(min=0)
    advantages_A = reverse_discounted_sum(delta_A, lengths_R, params.gamma * lambd)
    targets_A = advantages_A
    if params.critic_lambd is not None:
        targets_A = reverse_discounted_sum(delta_A, lengths_R, params.gamma * params.critic_lambd)
    return Advantages(advantages_N=actions.put(advantages_A), returns_N=actions.put(targets_A + values_A))


def temporal_differences(rewards_A: Tensor, values_A: Tensor, lengths_R: Tensor, gamma: float) -> Tensor:
    """Returns r_t + gamma V_{t+1} - V_t within each rollout of `lengths_R` steps; V is 0 after its end."""
    next_A = torch.empty_like(values_A)
    next_A[:-1] = values_A[1:]
    next_A[last_tokens(lengths_R)] = 0.0
    return torch.add(rewards_A, next_A, alpha=gamma).sub_(values_A)
