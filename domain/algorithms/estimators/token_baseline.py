"""An estimator whose baseline is each place's own."""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.actions import Actions
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("optimal_token_baseline")
def optimal_token_baseline(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """G_t - sum(W_t G_t) / sum(W_t), the sums over the group's rollouts that have a t-th action token (Li et al. 2026,
    "The Optimal Token Baseline", arXiv:2602.07078): the baseline with which the gradient varies least.

    G_t is the reward to go with the KL penalties. W_t is the sum, over a rollout's tokens up to t, of the squared norm
    of the gradient of log p by the logits, 1 - 2 p + sum_v p_v^2. Tokens of the longest rollout, at places where no
    other has one, take the last baseline before them; in a group of one rollout they take their own G_t, so that the
    advantage is 0.

    Raises:
        ValueError: `logprobs_N` or `collision_N` is missing.
    """
    if inputs.logprobs_N is None or inputs.collision_N is None:
        raise ValueError("optimal_token_baseline needs logprobs_N and collision_N of the policy before the update.")
    actions = Actions(inputs)
    rewards_A = actions.take(inputs.rewards_N).double()
    if len(rewards_A) == 0:
        empty_N = torch.zeros_like(inputs.rewards_N)
        return Advantages(advantages_N=empty_N, returns_N=empty_N)
    penalties_A = actions.take(inputs.token_rewards_N).double()
    togo_A = reverse_discounted_sum(rewards_A + penalties_A, actions.lengths_R, 1.0)
    size_A = reverse_discounted_sum(rewards_A.abs() + penalties_A.abs(), actions.lengths_R, 1.0)
    weight_A = _gradient_norms(actions, inputs.logprobs_N, inputs.collision_N)
    place_A, count_P = _places(actions)

    zeros_P = togo_A.new_zeros(len(count_P))
    weight_P = zeros_P.index_add(0, place_A, weight_A)
    certain_A = (weight_P == 0)[place_A]  # the gradient of a certain token is 0, whatever is subtracted
    weight_A, weight_P = torch.where(certain_A, 1.0, weight_A), torch.where(weight_P == 0, count_P, weight_P)
    baseline_P = zeros_P.index_add(0, place_A, weight_A * togo_A) / weight_P
    low_P, high_P, size_P = (
        zeros_P.scatter_reduce(0, place_A, column_A, reduce, include_self=False)
        for column_A, reduce in ((togo_A, "amin"), (togo_A, "amax"), (size_A, "amax"))
    )
    equal_P = high_P - low_P <= SAME * size_P  # false for NaN

    compared_A = _last_compared(actions, place_A, count_P)
    raised_A = togo_A - baseline_P[compared_A]
    # Rewards to go that were equal at the last place that is compared may differ after it.
    nothing_A = equal_P[compared_A] & (raised_A.abs() <= SAME * torch.maximum(size_A, size_P[compared_A]))
    advantages_A = torch.where(nothing_A, 0.0, raised_A)
    advantages_N = actions.put(advantages_A.to(inputs.rewards_N.dtype))
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)


def _gradient_norms(actions: Actions, logprobs_N: Tensor, collision_N: Tensor) -> Tensor:
    """Returns W_t at each action token."""
    logprobs_A, collision_A = (actions.take(column_N).double() for column_N in (logprobs_N, collision_N))
    probability_A = logprobs_A.exp()
    # The sum over v is at least p^2 of the token itself, which rounding, or a grammar that allows few tokens, may hide.
    norm_A = torch.maximum(1 - 2 * probability_A + (-collision_A).exp(), (1 - probability_A).square())
    return reverse_discounted_sum(norm_A.flip(0), actions.lengths_R.flip(0), 1.0).flip(0)


def _places(actions: Actions) -> tuple[Tensor, Tensor]:
    """Returns the place (t of a group, numbered over all groups) of each action token, ascending in a rollout, and the
    number of tokens at each place."""
    lengths_R, rollout_A = actions.lengths_R, actions.rollout_A
    number_A = torch.arange(len(rollout_A), device=rollout_A.device) - (lengths_R.cumsum(0) - lengths_R)[rollout_A]
    group_A = actions.group_R[rollout_A]
    _, place_A, count_P = torch.unique(group_A * lengths_R.max() + number_A, return_inverse=True, return_counts=True)
    return place_A, count_P


def _last_compared(actions: Actions, place_A: Tensor, count_P: Tensor) -> Tensor:
    """Returns the place of each action token, but the last one of its group that several rollouts have where one alone
    has the token's: such places are a group's last, because ever fewer rollouts are as long."""
    alone_A = (count_P == 1)[place_A]
    group_A = actions.group_R[actions.rollout_A]
    last_G = place_A.new_full((int(group_A.max()) + 1,), -1)
    last_G = last_G.scatter_reduce(0, group_A, torch.where(alone_A, -1, place_A), "amax")
    last_A = last_G[group_A]
    return torch.where(alone_A & (last_A >= 0), last_A, place_A)
