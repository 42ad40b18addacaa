"""What the estimators share: action tokens alone, and whitening."""

import torch
from torch import Tensor

from rollgrad.domain.estimators.types import EstimatorInput

VARIANCE_FLOOR = 1e-8
"""Variance below which whitening stops dividing by it."""


def sequence_ids(lengths_S: Tensor) -> Tensor:
    """Sequence of each token, [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)


def action_lengths(inputs: EstimatorInput) -> Tensor:
    """Action tokens of each sequence, [S]."""
    counts_S = torch.zeros_like(inputs.lengths_S)
    return counts_S.index_add_(0, sequence_ids(inputs.lengths_S), inputs.action_mask_N.to(counts_S.dtype))


def to_tokens(values_A: Tensor, action_mask_N: Tensor) -> Tensor:
    """Values of the action tokens back at their places, 0 elsewhere."""
    return torch.zeros(action_mask_N.shape, dtype=values_A.dtype, device=values_A.device).masked_scatter(
        action_mask_N, values_A
    )


def whiten(values_A: Tensor, *, std_norm: bool) -> Tensor:
    """Minus the mean, and divided by the (population) standard deviation if `std_norm`."""
    if len(values_A) == 0:
        return values_A
    centred_A = values_A - values_A.mean()
    if not std_norm:
        return centred_A
    return centred_A * centred_A.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
