"""Discounted sums within sequences, without a loop over time."""

import torch
from torch import Tensor

BLOCK = 64
"""Tokens summed by one row of a matrix product; the sums of blocks are combined by the same method."""


def reverse_discounted_sum(x_N: Tensor, lengths_S: Tensor, discount: float | Tensor) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each of the sequences laid end to end; y is 0 after their ends.

    Each block is one product with the triangular matrix discount^(j - i); what follows a block enters through the
    same recursion over blocks with discount^BLOCK. Nothing is divided by powers, so any discount in [0, 1] is exact
    up to rounding.

    Args:
        x_N: float32 or float64.
        lengths_S: int64, summing to N; zeros are allowed.
        discount: from 0 to 1; a tensor [S] gives each sequence its own.
    """
    if len(x_N) == 0:
        return x_N.clone()
    if isinstance(discount, Tensor):
        return _by_doubling(x_N, lengths_S, discount.to(x_N.dtype))
    blocks_S = -(-lengths_S // BLOCK)
    shift_S = (blocks_S.cumsum(0) - blocks_S) * BLOCK - (lengths_S.cumsum(0) - lengths_S)
    slot_N = torch.arange(len(x_N), device=x_N.device) + torch.repeat_interleave(shift_S, lengths_S)
    padded = x_N.new_zeros(int(blocks_S.sum()) * BLOCK)
    padded[slot_N] = x_N
    local = padded.view(-1, BLOCK) @ _powers(discount, x_N)
    if int(blocks_S.max()) > 1:
        totals = reverse_discounted_sum(local[:, 0], blocks_S, discount**BLOCK)
        carry = torch.cat([totals[1:], totals.new_zeros(1)])
        carry[blocks_S.cumsum(0)[blocks_S > 0] - 1] = 0.0  # nothing follows a sequence's last block
        exponents = torch.arange(BLOCK, 0, -1, device=x_N.device, dtype=x_N.dtype)
        local += carry[:, None] * torch.pow(discount, exponents)
    return local.flatten()[slot_N]


def _powers(discount: float, like: Tensor) -> Tensor:
    """[BLOCK, BLOCK] with discount^(j - i) at [j, i] for j >= i, else 0."""
    step = torch.arange(BLOCK, device=like.device)
    exponent = step[:, None] - step[None]
    powers = torch.pow(discount, exponent.clamp(min=0).double())
    return torch.where(exponent >= 0, powers, 0.0).to(like.dtype)


def _by_doubling(x_N: Tensor, lengths_S: Tensor, discount_S: Tensor) -> Tensor:
    """Sums over 1, 2, 4, ... tokens: y_t += discount^width * y_{t+width} while a sequence is that long."""
    ends_N = torch.repeat_interleave(lengths_S.cumsum(0), lengths_S)
    room_N = ends_N - torch.arange(len(x_N), device=x_N.device)
    factor_N = torch.repeat_interleave(discount_S, lengths_S)
    sums_N, width, longest = x_N, 1, int(lengths_S.max())
    while width < longest:
        ahead_N = torch.cat([sums_N[width:], sums_N.new_zeros(width)])
        sums_N = sums_N + torch.where(room_N > width, factor_N * ahead_N, 0.0)
        factor_N, width = factor_N.square(), 2 * width
    return sums_N
