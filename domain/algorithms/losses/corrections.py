"""Off-policy correction: the weight of a token that was sampled by another policy (behaviour policy mu) than the one
whose ratio is clipped (proximal policy pi).

Three independent choices, with w_t = pi / mu of a token:

- **level**: the importance ratio is that of a `token` (w_t), the product over the `sequence`, or its `geometric` mean.
- **mode**: the weight is min(ratio, high) (`truncate`), clamp(ratio, low, high) (`clip`), or the token's own w_t where
  low <= ratio <= high at that level, and 0 elsewhere (`mask`).
- **gate**: a further condition that leaves a token or sequence out:

  - `ratio`: none.
  - `binary_kl`, `tv`: a divergence of mu and pi at the sampled token (at the sequence levels: its mean over the
    sequence) is above `threshold`; `mask` then looks at this divergence instead of the ratio.
  - `opsm`: the sequence's mean log(mu / pi) is above `threshold` and the advantage is negative (DeepSeek-V3.2, section
    3.1, eq. 9).
  - `second_moment`: the token is among those of the optimizer step with the largest (log w)^2, which are left out until
    the mean of the others is at most `threshold` (`within_second_moment`, M2PO).

Named: TIS = token, truncate (Yao et al. 2025); IcePop = token, mask (Zhao et al. 2025, Ring-1T); seq-mask-TIS =
geometric, mask (OpenRLHF); OPSM = sequence, mask, opsm; M2PO = token, mask, second_moment.

All weights are constants to the gradient; every log-ratio is bounded before exp, so none is infinite or NaN.
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.losses.ratios import binary_kl, binary_tv, bounded, sequence_mean, sequence_sum
from rollgrad.domain.algorithms.settings import CorrectionSettings

SAME = 2.0**-16
"""Relative difference within which squares of log-ratios are equal: those of one token after one text, which is rounded
in float32 in another place in each pass and row."""


def correction_weights(
    correction: CorrectionSettings,
    *,
    logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    advantages_N: Tensor,
    action_mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    bypass: bool = False,
    kept_N: Tensor | None = None,
) -> Tensor:
    """Returns the factor of each token's loss, at least 0; 0 for tokens that are left out and outside actions.

    Args:
        correction: `level`, `mode` and `gate` as above, with their bounds; its level is not auto.
        logprobs_N: under the proximal policy, without gradient.
        rollout_logprobs_N: under the behaviour policy.
        advantages_N: the gate `opsm` reads their sign.
        action_mask_N: bool.
        sequence_N: sequence (0..S-1) of each token.
        sequences: S.
        bypass: the proximal policy is the behaviour policy, so that the loss's own ratio already holds w_t: weights are
            1 for tokens that are kept, and 0 for the others.
        kept_N: bool, what `within_second_moment` chose from the whole optimizer step; only that gate reads it.

    Raises:
        ValueError: unknown level, mode or gate, or a missing `kept_N`.
    """
    new_N, base_N = logprobs_N.detach(), rollout_logprobs_N
    where = action_mask_N, sequence_N, sequences
    log_ratio_N = bounded(new_N - base_N)
    match correction.level:
        case "token":
            level_N = log_ratio_N.exp()
        case "sequence":
            level_N = bounded(sequence_sum(log_ratio_N, *where)).exp()[sequence_N]
        case "geometric":
            level_N = sequence_mean(log_ratio_N, *where).exp()[sequence_N]
        case _:
            raise ValueError(f"Unknown correction level {correction.level!r}: use token, sequence or geometric.")
    if correction.gate != "second_moment":
        kept_N = _passes(correction, base_N, new_N, advantages_N, *where)
    elif kept_N is None:
        raise ValueError("The gate second_moment needs kept_N: tokens chosen from the whole optimizer step.")
    kept_N = action_mask_N & kept_N
    match correction.mode:
        case "truncate":
            weight_N = level_N.clamp(max=correction.high)
        case "clip":
            weight_N = level_N.clamp(correction.low, correction.high)
        case "mask":
            weight_N = log_ratio_N.exp()
            if correction.gate == "ratio":
                kept_N = kept_N & (level_N >= correction.low) & (level_N <= correction.high)
        case _:
            raise ValueError(f"Unknown correction mode {correction.mode!r}: use truncate, clip or mask.")
    return torch.where(kept_N, torch.ones_like(weight_N) if bypass else weight_N, 0.0)


def _passes(
    correction: CorrectionSettings,
    base_N: Tensor,
    new_N: Tensor,
    advantages_N: Tensor,
    action_mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
) -> Tensor:
    """Returns a mask of the tokens that the gate keeps."""
    match correction.gate:
        case "ratio":
            return torch.ones_like(action_mask_N)
        case "binary_kl":
            statistic_N = binary_kl(base_N, new_N)
        case "tv":
            statistic_N = binary_tv(base_N, new_N)
        case "opsm":
            statistic_N = base_N - new_N
        case _:
            raise ValueError(
                f"Unknown correction gate {correction.gate!r}: use ratio, binary_kl, tv, opsm or second_moment."
            )
    if correction.level != "token":
        statistic_N = sequence_mean(statistic_N, action_mask_N, sequence_N, sequences)[sequence_N]
    below_N = statistic_N <= correction.threshold
    return below_N | (advantages_N >= 0) if correction.gate == "opsm" else below_N


def within_second_moment(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, action_mask_N: Tensor, threshold: float
) -> Tensor:
    """Returns a mask of the action tokens that M2PO keeps (Zheng et al. 2025, "Prosperity before Collapse",
    arXiv:2510.01161, as AReaL applies it): tokens with the largest (log w)^2 are left out until the mean of the others
    is at most `threshold`. Tokens of equal (log w)^2 stay or go together, so that neither order nor division of samples
    matters.

    Args:
        logprobs_N: under the policy before the update.
        rollout_logprobs_N: under the behaviour policy.
        action_mask_N: bool; the tokens of a whole optimizer step.
        threshold: paper: 0.04.
    """
    squares_N = (logprobs_N - rollout_logprobs_N).double().square()
    ascending_A = squares_N[action_mask_N].sort().values
    means_A = ascending_A.cumsum(0) / torch.arange(1, len(ascending_A) + 1, device=ascending_A.device)
    above_A = (means_A > threshold).nonzero()[:, 0]
    if len(above_A) == 0:
        return action_mask_N
    return action_mask_N & (squares_N < (1 - SAME) * ascending_A[above_A[0]])


def interpolated_proximal(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, versions_N: Tensor, current_version: int
) -> Tensor:
    """Returns the log-probs of the proximal policy, without a forward pass.

    The proximal policy is that of version c - 1, where c is the version of the current policy. Its log-probs are
    interpolated linearly in the version, between the sampler's mu (version v) and the current policy's pi (version c):
    mu + (pi - mu) (c - 1 - v) / (c - v), and mu where v >= c - 1. This is AReaL's log-linear approximation (Fu et al.
    2025, section 5) of decoupled PPO's proximal policy (Hilton et al. 2022).
    """
    age_N = (current_version - versions_N).clamp(min=1).to(logprobs_N.dtype)
    return rollout_logprobs_N + (logprobs_N.detach() - rollout_logprobs_N) * ((age_N - 1) / age_N)
