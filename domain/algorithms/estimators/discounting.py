"""Discounted sums within sequences, without a loop over time.

A loop over tokens would take one kernel a token, and the usual shortcut, cumsum(x_t g^t) / g^t, loses all digits where
g^t underflows. Sums here double their reach instead: of 2 tokens, of 4, of 8, ... With discount g, over 4 tokens:

    after 1 step    x0 + g x1             x1 + g x2             x2 + g x3    x3
    after 2 steps   + g^2 (x2 + g x3)     + g^2 x3
"""

import torch
from torch import Tensor

BLOCK = 64
"""Tokens summed by one row of a matrix product; the sums of blocks are combined by the same method."""


def reverse_discounted_sum(x_N: Tensor, lengths_S: Tensor, discount: float | Tensor) -> Tensor:
    """Returns y_t = x_t + discount * y_{t+1} within each of the sequences laid end to end; y is 0 after their ends.

    Nothing is divided by powers and nothing is subtracted, so any discount in [0, 1] is exact up to rounding.

    >>> reverse_discounted_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]), 0.5)
    tensor([3., 4., 4., 8.])

    Args:
        x_N: float32 or float64.
        lengths_S: int64, summing to N; zeros are allowed.
        discount: factor from 0 to 1; a tensor [S] gives each sequence its own.
    """
    if len(x_N) == 0:
        return x_N.clone()
    if isinstance(discount, Tensor):
        return _by_doubling(x_N, lengths_S, discount.to(x_N.dtype))
    return _by_blocks(x_N, last_tokens(lengths_S), discount)


def last_tokens(lengths_S: Tensor) -> Tensor:
    """Returns the index of the last token of each sequence that has any."""
    return lengths_S.cumsum(0)[lengths_S > 0] - 1


def _by_blocks(x_N: Tensor, ends_E: Tensor, discount: float) -> Tensor:
    """Computes `reverse_discounted_sum` for sequences that end at `ends_E` (ascending, the last of them N - 1).

    1. Each block of the flat array is multiplied by the triangular matrix discount^(j - i), as if no sequence ended in
       it; the few blocks in which one ends are computed again by `_within_blocks`.
    2. A sum that continues into the next block lacks discount^(distance) x the next block's total. These totals follow
       the same recursion over blocks, with discount^BLOCK; a block in which a sequence ends passes nothing on.
    """
    blocks_BK = torch.nn.functional.pad(x_N, (0, -len(x_N) % BLOCK)).view(-1, BLOCK)
    sums_BK = blocks_BK @ _powers(discount, x_N)
    broken_D, which_E = torch.unique_consecutive(ends_E // BLOCK, return_inverse=True)
    ended_DK = torch.zeros(len(broken_D), BLOCK, dtype=torch.int64, device=x_N.device)
    ended_DK[which_E, ends_E % BLOCK] = 1
    ends_ahead_DK = ended_DK.flip(1).cumsum(1).flip(1)  # ends of sequences from a token to the end of its block
    sums_BK[broken_D] = _within_blocks(blocks_BK[broken_D], ends_ahead_DK, discount)
    if len(sums_BK) > 1:
        totals_B = _by_blocks(sums_BK[:, 0].contiguous(), broken_D, discount**BLOCK)
        carry_B = torch.cat([totals_B[1:], totals_B.new_zeros(1)])
        reach_K = torch.pow(discount, torch.arange(BLOCK, 0, -1, device=x_N.device, dtype=x_N.dtype))
        sums_BK[broken_D] += torch.where(ends_ahead_DK == 0, reach_K * carry_B[broken_D, None], 0.0)
        carry_B[broken_D] = 0.0
        sums_BK.addcmul_(carry_B[:, None], reach_K)
    return sums_BK.view(-1)[: len(x_N)]


def _within_blocks(x_DK: Tensor, ends_ahead_DK: Tensor, discount: float) -> Tensor:
    """Doubles the reach of sums within blocks. Two tokens of a block are of one sequence if equally many ends lie
    ahead.
    """
    width = 1
    while width < BLOCK:
        same = ends_ahead_DK[:, :-width] == ends_ahead_DK[:, width:]
        ahead = torch.where(same, discount**width * x_DK[:, width:], 0.0)
        x_DK = torch.cat([x_DK[:, :-width] + ahead, x_DK[:, -width:]], dim=1)
        width *= 2
    return x_DK


def _powers(discount: float, like: Tensor) -> Tensor:
    """Returns the matrix [BLOCK, BLOCK] with discount^(j - i) at [j, i] for j >= i, else 0."""
    step = torch.arange(BLOCK, device=like.device)
    exponent = step[:, None] - step[None]
    powers = torch.pow(discount, exponent.clamp(min=0).double())
    return torch.where(exponent >= 0, powers, 0.0).to(like.dtype)


def _by_doubling(x_N: Tensor, lengths_S: Tensor, discount_S: Tensor) -> Tensor:
    """Doubles the reach of sums: y_t += discount^width * y_{t+width} while a sequence is that long. It takes a discount
    for each sequence, which the matrix of `_by_blocks` cannot hold."""
    ends_N = torch.repeat_interleave(lengths_S.cumsum(0), lengths_S)
    room_N = ends_N - torch.arange(len(x_N), device=x_N.device)
    factor_N = torch.repeat_interleave(discount_S, lengths_S)
    sums_N, width, longest = x_N, 1, int(lengths_S.max())
    while width < longest:
        ahead_N = torch.cat([sums_N[width:], sums_N.new_zeros(width)])
        sums_N = sums_N + torch.where(room_N > width, factor_N * ahead_N, 0.0)
        factor_N, width = factor_N.square(), 2 * width
    return sums_N
