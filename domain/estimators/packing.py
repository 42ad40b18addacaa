"""What the estimators share: action tokens alone, their turns, and whitening."""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.estimators.types import EstimatorInput

VARIANCE_FLOOR = 1e-8
"""Variance below which whitening stops dividing by it."""


def sequence_ids(lengths_S: Tensor) -> Tensor:
    """Sequence of each token, [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)


@frozen(kw_only=True, eq=False)
class Actions:
    """Action tokens (A) of a batch: `index_A` their places, None where every token is one; `lengths_S` how many each
    sequence has."""

    tokens: int
    lengths_S: Tensor
    index_A: Tensor | None

    @classmethod
    def of(cls, inputs: EstimatorInput) -> "Actions":
        """The action tokens of a batch."""
        tokens = len(inputs.action_mask_N)
        if bool(inputs.action_mask_N.all()):
            return cls(tokens=tokens, lengths_S=inputs.lengths_S, index_A=None)
        index_A = inputs.action_mask_N.nonzero()[:, 0]
        stops_S = torch.searchsorted(index_A, inputs.lengths_S.cumsum(0))
        return cls(tokens=tokens, lengths_S=stops_S.diff(prepend=stops_S.new_zeros(1)), index_A=index_A)

    def take(self, values_N: Tensor) -> Tensor:
        """The values of the action tokens alone."""
        return values_N if self.index_A is None else values_N.index_select(0, self.index_A)

    def put(self, values_A: Tensor) -> Tensor:
        """Values of the action tokens back at their places, 0 elsewhere."""
        if self.index_A is None:
            return values_A
        return values_A.new_zeros(self.tokens).scatter_(0, self.index_A, values_A)


def whiten_over(values_A: Tensor, groups_A: Tensor | None, *, std_norm: bool) -> Tensor:
    """Minus the mean, and divided by the (population) standard deviation if `std_norm`; over all values, or apart for
    each of `groups_A`."""
    if len(values_A) == 0:
        return values_A
    if groups_A is None:
        index_A = torch.zeros(len(values_A), dtype=torch.int64, device=values_A.device)
    else:
        _, index_A = torch.unique(groups_A, return_inverse=True)
    count_A = _totals(torch.ones_like(values_A), index_A)
    centred_A = values_A - _totals(values_A, index_A) / count_A
    if not std_norm:
        return centred_A
    variance_A = _totals(centred_A.square(), index_A) / count_A
    return centred_A * variance_A.clamp(min=VARIANCE_FLOOR).rsqrt()


def _totals(values_A: Tensor, index_A: Tensor) -> Tensor:
    """Each value's group total, summed in float64."""
    sums = torch.zeros(int(index_A.max()) + 1, dtype=torch.float64, device=values_A.device)
    return sums.index_add_(0, index_A, values_A.double())[index_A].to(values_A.dtype)


@frozen(kw_only=True, eq=False)
class Turns:
    """Action tokens (A) gathered into turns (U), in the order of the batch: `turn_A` is the turn of each action token,
    `first_U` the index in A of a turn's first token, `sequence_U` its sequence, `rewards_U` its reward."""

    turn_A: Tensor
    first_U: Tensor
    sequence_U: Tensor
    rewards_U: Tensor

    @classmethod
    def of(cls, inputs: EstimatorInput, actions: Actions) -> "Turns":
        """The turns of a batch."""
        sequence_A = sequence_ids(actions.lengths_S)
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
        return cls(
            turn_A=turn_A,
            first_U=first_U,
            sequence_U=sequence_A[first_U],
            rewards_U=rewards_A.new_zeros(len(first_U)).index_add_(0, turn_A, rewards_A),
        )
