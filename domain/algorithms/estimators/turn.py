"""Estimators whose time step is a turn, not a token: they read the reward of each turn.

Every action token of a turn has the turn's advantage; `gamma` and `lambd` count turns. Rewards per token (the KL
penalty) belong to their turn in `turn_gae`; in the others their undiscounted sum from a token on is added, as in
`group`.

Example: a group of two rollouts of two turns, with rewards (1, 0) and (0, 2), gamma 1, no KL.

- `turn_group_norm`: rewards from each turn on are (1, 0) and (2, 2). Turn 1 compares 1 with 2, turn 2 compares 0 with
2:
  advantages (-0.71, -0.71) and (0.71, 0.71).
- `process_group_norm`: the four rewards have mean 0.75 and standard deviation 0.96, so normalised they are
  (0.26, -0.78) and (-0.78, 1.31); summed from each turn on: (-0.52, -0.78) and (0.52, 1.31).
- `gigpo`: the outcomes 1 and 2 give (-0.71, -0.71) and (0.71, 0.71). If the first turns alone were played in the same
  state, the rewards from there on, 1 and 2, add (-0.71, 0) and (0.71, 0).
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.actions import Actions, Turns
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.algorithms.estimators.gae import temporal_differences
from rollgrad.domain.algorithms.estimators.group import STD_FLOOR, Rollouts
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
    actions = Actions(inputs)
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
    """GRPO's normalisation for each turn, a definition of rollgrad's own. The advantage of turn k is the discounted sum
    of the rollout's rewards from turn k on, normalised by the mean and the unbiased standard deviation of these sums
    over the group's rollouts that reached turn k. Each turn's advantages sum to 0 over the group; a turn that only one
    rollout reached teaches nothing. Turns are counted over all branches of a rollout. The paper's form is
    `process_group_norm`."""
    actions = Actions(inputs)
    turns = Turns.of(inputs, actions)
    rollout_U, lengths_R = turns.rollout_U, turns.lengths_R
    togo_U = reverse_discounted_sum(turns.rewards_U.double(), lengths_R, params.gamma)
    starts_R = lengths_R.cumsum(0) - lengths_R
    number_U = torch.arange(len(rollout_U), device=rollout_U.device) - starts_R[rollout_U]  # k of each turn
    cells = torch.stack([actions.group_R[rollout_U], number_U], dim=1)
    _, cell_U = torch.unique(cells, dim=0, return_inverse=True)
    size_U = reverse_discounted_sum(turns.rewards_U.double().abs(), lengths_R, params.gamma)
    return _with_token_rewards(inputs, actions, turns, _normalised(togo_U, size_U, cell_U))


@estimator("process_group_norm")
def process_group_norm(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """GRPO with process supervision: each turn's reward is normalised by the mean and the unbiased standard deviation
    of the rewards of all turns in the group; a turn's advantage is the sum of these from that turn on (Shao et al.
    2024, "DeepSeekMath", section 4.1.3). A group in which all turns have the same reward teaches nothing."""
    actions = Actions(inputs)
    turns = Turns.of(inputs, actions)
    rewards_U = turns.rewards_U.double()
    _, group_U = torch.unique(actions.group_R[turns.rollout_U], return_inverse=True)
    normalised_U = _normalised(rewards_U, rewards_U.abs(), group_U)
    return _with_token_rewards(inputs, actions, turns, reverse_discounted_sum(normalised_U, turns.lengths_R, 1.0))


@estimator("gigpo")
def gigpo(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
    """Group-in-group advantages (Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training",
    arXiv:2505.10978, eq. 8): the sum of two parts. One is the rollout's outcome, normalised in its group. The other is
    `step_weight` times the discounted sum of its rewards from the turn on, normalised among all turns of the group that
    were played in the same state. Both are divided by the unbiased standard deviation, or with `no_std_norm` by nothing
    (F_norm = 1). A turn whose state no other shares has the first alone.

    Raises:
        ValueError: `state_ids_N` is missing.
    """
    if inputs.state_ids_N is None:
        raise ValueError("gigpo needs state_ids_N: the states in which turns were played.")
    actions = Actions(inputs)
    turns = Turns.of(inputs, actions)
    rollout_U, lengths_R, rewards_U = turns.rollout_U, turns.lengths_R, turns.rewards_U.double()
    group_U = actions.group_R[rollout_U]
    cells = torch.stack([group_U, actions.take(inputs.state_ids_N)[turns.first_U]], dim=1)
    _, cell_U = torch.unique(cells, dim=0, return_inverse=True)
    togo_U, size_U = (
        reverse_discounted_sum(each_U, lengths_R, params.gamma) for each_U in (rewards_U, rewards_U.abs())
    )
    steps_U = _normalised(togo_U, size_U, cell_U, std_norm=not params.no_std_norm)
    rollouts = Rollouts(inputs)
    if params.no_std_norm:
        episodes_R = rollouts.centred(rollouts.outcome_R)
    else:
        episodes_R = rollouts.normalised(rollouts.outcome_R, rollouts.size_R)
    return _with_token_rewards(inputs, actions, turns, episodes_R[rollout_U] + params.step_weight * steps_U)


def _normalised(values_U: Tensor, size_U: Tensor, cell_U: Tensor, *, std_norm: bool = True) -> Tensor:
    """Returns values minus the mean of their cell (numbered from 0), divided by its unbiased standard deviation if
    `std_norm`; 0 in a cell whose values differ by no more than the rounding error of its largest. NaN stays NaN."""

    def total(column_U: Tensor) -> Tensor:
        return column_U.new_zeros(len(column_U)).index_add_(0, cell_U, column_U)[cell_U]

    count_U = total(torch.ones_like(values_U))
    centred_U = values_U - total(values_U) / count_U
    std_U = (total(centred_U.square()) / (count_U - 1).clamp(min=1)).sqrt()
    size_U = torch.zeros_like(size_U).scatter_reduce(0, cell_U, size_U, "amax", include_self=False)[cell_U]
    scaled_U = centred_U / (std_U + STD_FLOOR) if std_norm else centred_U
    return torch.where(std_U <= SAME * size_U, 0.0, scaled_U)


def _with_token_rewards(inputs: EstimatorInput, actions: Actions, turns: Turns, advantages_U: Tensor) -> Advantages:
    """Returns each turn's advantage at all its tokens, plus the sum of the token rewards from there on."""
    togo_A = reverse_discounted_sum(actions.take(inputs.token_rewards_N), actions.lengths_R, 1.0)
    advantages_N = actions.put(advantages_U.to(inputs.rewards_N.dtype)[turns.turn_A] + togo_A)
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
