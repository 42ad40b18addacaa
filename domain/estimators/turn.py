"""Estimators whose step is a turn, not a token: they read the per-turn reward vector.

Every action token of a turn has the turn's advantage; `gamma` and `lambd` count turns. Rewards per token (the KL
penalty) count for the turn they fall into in `turn_gae`, and add their undiscounted sum from a token on in
`turn_group_norm`, as in `group`.
"""

import torch

from rollgrad.domain.estimators.gae import temporal_differences
from rollgrad.domain.estimators.group import SAME, STD_FLOOR
from rollgrad.domain.estimators.packing import Actions, Turns
from rollgrad.domain.estimators.registry import estimator
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from rollgrad.domain.estimators.types import Advantages, EstimatorInput, EstimatorParams


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
    """GRPO's normalisation (Shao et al. 2024, section 4.1.3, process supervision) turn by turn: the discounted sum of
    the rewards from turn k of a rollout on, minus the mean and over the unbiased standard deviation of the same among
    the group's rollouts that reached turn k. A turn that only one rollout reached teaches nothing. Turns are counted
    over all branches of a rollout."""
    actions = Actions.of(inputs)
    turns = Turns.of(inputs, actions)
    rollout_U, lengths_R = turns.rollout_U, turns.lengths_R
    togo_U = reverse_discounted_sum(turns.rewards_U.double(), lengths_R, params.gamma)
    starts_R = lengths_R.cumsum(0) - lengths_R
    number_U = torch.arange(len(rollout_U), device=rollout_U.device) - starts_R[rollout_U]
    cells = torch.stack([actions.group_R[rollout_U], number_U], dim=1)
    _, cell_U = torch.unique(cells, dim=0, return_inverse=True)

    def total(values_U: torch.Tensor) -> torch.Tensor:
        return values_U.new_zeros(len(values_U)).index_add_(0, cell_U, values_U)[cell_U]

    count_U = total(torch.ones_like(togo_U))
    centred_U = togo_U - total(togo_U) / count_U
    std_U = (total(centred_U.square()) / (count_U - 1).clamp(min=1)).sqrt()
    centred_U = torch.where(std_U > SAME * (1 + togo_U.abs()), centred_U, 0.0)
    outcome_A = (centred_U / (std_U + STD_FLOOR)).to(inputs.rewards_N.dtype)[turns.turn_A]
    togo_A = reverse_discounted_sum(actions.take(inputs.token_rewards_N), actions.lengths_R, 1.0)
    advantages_N = actions.put(outcome_A + togo_A)
    return Advantages(advantages_N=advantages_N, returns_N=advantages_N)
