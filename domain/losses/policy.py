"""Policy losses per token."""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.losses.kl import MAX_LOG_RATIO


@frozen(kw_only=True, eq=False)
class PolicyLoss:
    """`loss_N`, the importance ratio `ratio_N`, and where the clip is active (no gradient) on either side."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logprobs - old_logprobs).

    Schulman et al. 2017, eq. 7; separate bounds: DAPO (Yu et al. 2025), eq. 10. With `dual_clip` c > 1 the loss of a
    negative advantage is at most -c A (Ye et al. 2020, eq. 5).
    """
    ratio_N = (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    loss_N = -torch.minimum(plain_N, clipped_N)
    if dual_clip is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -dual_clip * advantages_N), loss_N)
    active_N = clipped_N < plain_N
    return PolicyLoss(
        loss_N=loss_N,
        ratio_N=ratio_N,
        clipped_low_N=active_N & (advantages_N < 0),
        clipped_high_N=active_N & (advantages_N > 0),
    )
