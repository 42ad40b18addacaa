"""Building blocks of the estimators: the action tokens of a batch, their turns, and whitening."""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.types import EstimatorInput
from rollgrad.domain.batches.packed import rollout_ids

VARIANCE_FLOOR = 1e-8
"""Variance below which whitening stops dividing by it."""


@frozen(kw_only=True, eq=False)
class Actions:
    """Action tokens (A) of a batch, rollout (R) after rollout, the branches of each chained in the order of its turns.

    `tokens`: tokens of the batch (N). `index_A`: index of each action token in the batch, None if all N tokens are
    actions in this order. `lengths_R`: action tokens of each rollout. `rollout_S`: rollout of each sequence, in order
    of first appearance. `group_R`: group of each rollout, from 0. `sequence_A`: sequence of each action token.
    """

    tokens: int
    index_A: Tensor | None
    lengths_R: Tensor
    rollout_S: Tensor
    group_R: Tensor
    sequence_A: Tensor

    @classmethod
    def of(cls, inputs: EstimatorInput) -> "Actions":
        """Returns the action tokens of a batch."""
        tokens = len(inputs.action_mask_N)
        index_A, lengths_S = None, inputs.lengths_S
        if not bool(inputs.action_mask_N.all()):
            index_A = inputs.action_mask_N.nonzero()[:, 0]
            stops_S = torch.searchsorted(index_A, inputs.lengths_S.cumsum(0))
            lengths_S = stops_S.diff(prepend=stops_S.new_zeros(1))
        sequence_A = torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)
        rollout_S = rollout_ids(inputs.group_ids_S, inputs.sample_ids_S)
        rollouts = int(rollout_S.max()) + 1 if len(rollout_S) else 0
        if rollouts < len(rollout_S):  # else the tokens are in this order already
            if index_A is None:
                index_A = torch.arange(tokens, device=lengths_S.device)
            by_turn_A = torch.arange(len(index_A), device=lengths_S.device)
            if inputs.turn_ids_N is not None:
                by_turn_A = inputs.turn_ids_N[index_A].argsort(stable=True)
            # Two stable sorts: by turn, then by rollout, so that each rollout's tokens stay in the order of their
            # turns.
            order_A = by_turn_A[rollout_S[sequence_A][by_turn_A].argsort(stable=True)]
            index_A, sequence_A = index_A[order_A], sequence_A[order_A]
        _, group_S = torch.unique(inputs.group_ids_S, return_inverse=True)
        return cls(
            tokens=tokens,
            index_A=index_A,
            lengths_R=lengths_S.new_zeros(rollouts).index_add_(0, rollout_S, lengths_S),
            rollout_S=rollout_S,
            group_R=group_S.new_zeros(rollouts).index_put_((rollout_S,), group_S),
            sequence_A=sequence_A,
        )

    @property
    def rollout_A(self) -> Tensor:
        """Rollout of each token."""
        return self.rollout_S[self.sequence_A]

    def take(self, values_N: Tensor) -> Tensor:
        """Returns the values of the action tokens alone."""
        return values_N if self.index_A is None else values_N.index_select(0, self.index_A)

    def put(self, values_A: Tensor) -> Tensor:
        """Returns an array [N] with the values at the action tokens, and 0 elsewhere."""
        if self.index_A is None:
            return values_A
        return values_A.new_zeros(self.tokens).scatter_(0, self.index_A, values_A)


def whiten_over(values_A: Tensor, groups_A: Tensor | None, *, std_norm: bool) -> Tensor:
    """Returns the values minus their mean, divided by their (population) standard deviation if `std_norm`. Both are
    taken over all values, or within each group of `groups_A`."""
    if groups_A is None:
        return _whitened(values_A, std_norm=std_norm)
    _, counts_G = torch.unique(groups_A, return_counts=True)
    result_A = torch.empty_like(values_A)
    for index in torch.split(groups_A.argsort(stable=True), counts_G.tolist()):
        result_A[index] = _whitened(values_A[index], std_norm=std_norm)
    return result_A


def _whitened(values_A: Tensor, *, std_norm: bool) -> Tensor:
    # In float64 until the mean is subtracted: rounding the mean to float32 would shift every value by that error.
    if len(values_A) == 0:
        return values_A
    exact_A = values_A.double()
    centred_A = exact_A - exact_A.mean()
    if bool(centred_A.abs().max() <= SAME * exact_A.abs().max()):
        return torch.zeros_like(values_A)  # they differ by rounding alone, which the division would blow up to 1
    if std_norm:
        centred_A *= centred_A.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
    return centred_A.to(values_A.dtype)


@frozen(kw_only=True, eq=False)
class Turns:
    """Turns (U) of the action tokens (A), in the order of `Actions`.

    `turn_A`: turn of each action token. `first_U`: index in A of a turn's first token. `rollout_U`, `rewards_U`:
    rollout and reward of each turn. `lengths_R`: number of turns of each rollout."""

    turn_A: Tensor
    first_U: Tensor
    rollout_U: Tensor
    rewards_U: Tensor
    lengths_R: Tensor

    @classmethod
    def of(cls, inputs: EstimatorInput, actions: Actions) -> "Turns":
        """Returns the turns of a batch."""
        sequence_A = actions.sequence_A
        if inputs.turn_ids_N is None:
            position_A = actions.take(torch.arange(actions.tokens, device=sequence_A.device))
            same_A = position_A[1:] == position_A[:-1] + 1
        else:
            turn_ids_A = actions.take(inputs.turn_ids_N)
            same_A = turn_ids_A[1:] == turn_ids_A[:-1]
        opens_A = torch.ones_like(sequence_A, dtype=torch.bool)
        opens_A[1:] = ~(same_A & (sequence_A[1:] == sequence_A[:-1]))
        turn_A = opens_A.cumsum(0) - 1
        first_U = opens_A.nonzero()[:, 0]
        rewards_A = actions.take(inputs.rewards_N)
        rollout_U = actions.rollout_A[first_U]
        return cls(
            turn_A=turn_A,
            first_U=first_U,
            rollout_U=rollout_U,
            rewards_U=rewards_A.new_zeros(len(first_U)).index_add_(0, turn_A, rewards_A),
            lengths_R=torch.bincount(rollout_U, minlength=len(actions.lengths_R)),
        )
