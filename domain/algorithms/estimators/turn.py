"""Estimators whose step is a turn, not a token: they read the per-turn reward vector.

Every action token of a turn has the turn's advantage; `gamma` and `lambd` count turns. Rewards per token (the KL
penalty) count for the turn they fall into in `turn_gae`, and add their undiscounted sum from a token on in the others,
as in `group`.
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.actions import Actions, Turns
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.gae import temporal_differences
from rollgrad.domain.algorithms.estimators.group import STD_FLOOR
from rollgrad.domain.algorithms.estimators.registry import estimator
from rollgrad.domain.algorithms.estimators.types import Advantages, EstimatorInput, EstimatorParams


@estimator("turn_gae")
def turn_gae(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GAE (Schulman et al. 2016, eq. 16) over turns: V_k is the value at turn k's first token. The critic's target at
    each token of a turn is the turn's return.

    Raises:
        ValueError: `values_N` is missing.
    """
    if inputs.values_N is None:
        raise ValueError("turn_gae needs values_N from a critic.")
    actions = Actions.of(inputs)
    turns = Turns.of(inputs, actions)
    values_U = actions.take(inputs.values_N)[turns.first_U]
    rewards_U = turns.rewards_U.index_add(0, turns.turn_A, actions.take(inputs.token_rewards_N))
    delta_U = temporal_differences(rewards_U, values_U, turns.lengths_R, params.gamma)
    advantages_U = reverse_discounted_sum(delta_U, turns.lengths_R, params.gamma * params.lambd)
    targets_U = advantages_U
    if params.critic_lambd is not None:
        targets_U = reverse_discounted_sum(delta_U, turns.lengths_R, params.gamma * params.critic_lambd)
    return Advantages(
        advantages_N=actions.put(advantages_U[turns.turn_A]),
        returns_N=actions.put((targets_U + values_U)[turns.turn_A]),
    )


@estimator("turn_group_norm")
def turn_group_norm(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GRPO's normalisation turn by turn, rollgrad's own: the discounted sum of the rewards from turn k of a rollout on,
    minus the mean and over the unbiased standard deviation of the same among the group's rollouts that reached turn k.
    Each turn's advantages sum to 0 over the group; a turn that only one rollout reached teaches nothing. Turns are
    counted over all branches of a rollout. The paper's form is `process_group_norm`."""
    actions = Actions.of(inputs)
    turns = Turns.of(inputs, actions)
    rollout_U, lengths_R = turns.rollout_U, turns.lengths_R
    togo_U = reverse_discounted_sum(turns.rewards_U.double(), lengths_R, params.gamma)
    starts_R = lengths_R.cumsum(0) - lengths_R
    number_U = torch.arange(len(rollout_U), device=rollout_U.device) - starts_R[rollout_U]
    cells = torch.stack([actions.group_R[rollout_U], number_U], dim=1)
    _, cell_U = torch.unique(cells, dim=0, return_inverse=True)
    size_U = reverse_discounted_sum(turns.rewards_U.double().abs(), lengths_R, params.gamma)
    return _with_token_rewards(inputs, actions, turns, _normalised(togo_U, size_U, cell_U))


@estimator("process_group_norm")
def process_group_norm(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GRPO with process supervision: each turn's reward minus the mean and over the unbiased standard deviation of the
    rewards of all turns of the group's rollouts; a turn's advantage is the sum of these from it on (Shao et al. 2024,
    "DeepSeekMath", section 4.1.3). A group whose turns are all rewarded alike teaches nothing."""
    actions = Actions.of(inputs)
    turns = Turns.of(inputs, actions)
    rewards_U = turns.rewards_U.double()
    _, group_U = torch.unique(actions.group_R[turns.rollout_U], return_inverse=True)
    normalised_U = _normalised(rewards_U, rewards_U.abs(), group_U)
    return _with_token_rewards(inputs, actions, turns, reverse_discounted_sum(normalised_U, turns.lengths_R, 1.0))


def _normalised(values_U: Tensor, size_U: Tensor, cell_U: Tensor) -> Tensor:
    """Returns the values minus the mean and over the unbiased standard deviation of their cell (numbered from 0); 0
    where the cell's values differ by no more than the rounding of numbers of its largest size. NaN stays NaN."""

    def total(column_U: Tensor) -> Tensor:
        return column_U.new_zeros(len(column_U)).index_add_(0, cell_U, column_U)[cell_U]

    count_U = total(torch.ones_like(values_U))
    centred_U = values_U - total(values_U) / count_U
    std_U = (total(centred_U.square()) / (count_U - 1).clamp(min=1)).sqrt()
    size_U = torch.zeros_like(size_U).scatter_reduce(0, cell_U, size_U, "amax", include_self=False)[cell_U]
    return torch.where(std_U <= SAME * size_U, 0.0, centred_U / (std_U + STD_FLOOR))


def _with_token_rewards(inputs: EstimatorInput, actions: Actions, turns: Turns, advantages_U: Tensor) -> Advantages:
    """Advantages of turns on all their tokens, plus the token rewards still to come."""
    togo_A = reverse_discounted_sum(actions.take(inputs.token_rewards_N), actions.lengths_R, 1.0)
    advantages_N = actions.put(advantages_U.to(inputs.rewards_N.dtype)[turns.turn_A] + togo_A)
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
