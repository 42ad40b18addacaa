"""Building blocks of the estimators: the action tokens of a batch, their turns, and whitening."""

from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.estimators.types import EstimatorInput
from rollgrad.domain.batches.by_sequence import counts, rollout_ids

VARIANCE_FLOOR = 1e-8
"""Variance below which whitening stops dividing by it."""


@frozen(eq=False)
class Actions:
    """Action tokens (A) of a batch, rollout (R) after rollout, the branches of each chained in the order of its turns.
    Each column is computed when it is first read.
    """

    inputs: EstimatorInput

    @property
    def tokens(self) -> int:
        """Tokens of the batch (N)."""
        return len(self.inputs.action_mask_N)

    @cached_property
    def index_A(self) -> Tensor | None:
        """Index of each action token in the batch; None if all N tokens are actions in this order."""
        return self._ordered[0]

    @cached_property
    def sequence_A(self) -> Tensor:
        """Sequence of each action token."""
        return self._ordered[1]

    @cached_property
    def lengths_R(self) -> Tensor:
        """Action tokens of each rollout."""
        actions_S = self._lengths_S
        return actions_S.new_zeros(self._rollouts).index_add_(0, self.rollout_S, actions_S)

    @cached_property
    def rollout_S(self) -> Tensor:
        """Rollout of each sequence, in order of first appearance."""
        return rollout_ids(self.inputs.group_ids_S, self.inputs.sample_ids_S)

    @cached_property
    def group_R(self) -> Tensor:
        """Group of each rollout, from 0."""
        group_S: Tensor = torch.unique(self.inputs.group_ids_S, return_inverse=True)[1]
        return group_S.new_zeros(self._rollouts).index_put_((self.rollout_S,), group_S)

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

    @cached_property
    def _rollouts(self) -> int:
        return int(self.rollout_S.max()) + 1 if len(self.rollout_S) else 0

    @cached_property
    def _lengths_S(self) -> Tensor:
        return counts(self.inputs.action_mask_N, self.inputs.lengths_S)

    @cached_property
    def _ordered(self) -> tuple[Tensor | None, Tensor]:
        inputs, lengths_S = self.inputs, self._lengths_S
        index_A = None if bool(inputs.action_mask_N.all()) else inputs.action_mask_N.nonzero()[:, 0]
        sequence_A = torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)
        if self._rollouts == len(lengths_S):  # the tokens are in this order already
            return index_A, sequence_A
        if index_A is None:
            index_A = torch.arange(self.tokens, device=lengths_S.device)
        by_turn_A = torch.arange(len(index_A), device=lengths_S.device)
        if inputs.turn_ids_N is not None:
            by_turn_A = inputs.turn_ids_N[index_A].argsort(stable=True)
        # Two stable sorts: by turn, then by rollout, so that each rollout's tokens stay in the order of their turns.
        order_A = by_turn_A[self.rollout_S[sequence_A][by_turn_A].argsort(stable=True)]
        return index_A[order_A], sequence_A[order_A]


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
    """Turns (U) of the action tokens (A), in the order of `Actions`."""

    turn_A: Tensor
    """Turn of each action token."""
    first_U: Tensor
    """Index in A of a turn's first token."""
    rollout_U: Tensor
    """Rollout of each turn."""
    rewards_U: Tensor
    """Reward of each turn."""
    lengths_R: Tensor
    """Number of turns of each rollout."""

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
