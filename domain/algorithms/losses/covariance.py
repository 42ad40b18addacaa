"""Tokens chosen from a whole optimizer step by the covariance of log-prob and advantage (Cui et al. 2025, "The Entropy
Mechanism of Reinforcement Learning for Reasoning Language Models", section 4).

Tokens are chosen before the step is split, from the log-probs before the update, so the choice is the same for every
split, order and packing. On the first step of a rollout these are the current log-probs, as in the paper.
"""

import torch
from torch import Tensor

from rollgrad.domain.algorithms.settings import PolicyLossSettings
from rollgrad.domain.batches.packed import RolloutBatch

KNUTH = 2654435761
"""Multiplier of multiplicative hashing (Knuth, TAOCP vol. 3, section 6.4)."""
TURN_STRIDE = 0x1E3779B97F4A7C15
"""Odd, with low bits far from those of samples and positions; products that overflow 64 bits wrap."""


def covariances(logprobs_N: Tensor, advantages_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """Returns (log p - mean) (A - mean), with means over the step's action tokens (eq. 11); 0 elsewhere."""
    count = action_mask_N.sum().clamp(min=1)
    logprobs_N = torch.where(action_mask_N, logprobs_N, 0.0).double()
    advantages_N = torch.where(action_mask_N, advantages_N, 0.0).double()
    product_N = (logprobs_N - logprobs_N.sum() / count) * (advantages_N - advantages_N.sum() / count)
    return torch.where(action_mask_N, product_N, 0.0)


def clip_cov_tokens(
    logprobs_N: Tensor,
    advantages_N: Tensor,
    action_mask_N: Tensor,
    *,
    share: float,
    limits: tuple[float, float],
    keys_N: Tensor,
) -> Tensor:
    """Returns a pseudo-random `share` of the action tokens (at least one) among those whose covariance is within
    `limits`.

    `keys_N`: int64, identifies each token, as `token_keys` does. Which of the eligible tokens are chosen depends on the
    keys alone.
    """
    covariance_N = covariances(logprobs_N, advantages_N, action_mask_N)
    eligible_N = action_mask_N & (covariance_N > limits[0]) & (covariance_N < limits[1])
    wanted = max(1, int(share * int(action_mask_N.sum())))
    return torch.zeros_like(action_mask_N).index_fill_(0, _shuffled(eligible_N, keys_N)[:wanted], True)


def kl_cov_tokens(
    logprobs_N: Tensor, advantages_N: Tensor, action_mask_N: Tensor, *, share: float, keys_N: Tensor
) -> Tensor:
    """Returns the `share` of the action tokens (at least one, if there is any) with the largest covariance, of equal
    ones a pseudo-random choice as in `clip_cov_tokens`."""
    covariance_N = covariances(logprobs_N, advantages_N, action_mask_N)
    candidates = _shuffled(action_mask_N, keys_N)
    order = covariance_N[candidates].argsort(descending=True, stable=True)
    chosen = candidates[order[: max(1, int(share * len(candidates)))]]
    return torch.zeros_like(action_mask_N).index_fill_(0, chosen, True)


def _shuffled(mask_N: Tensor, keys_N: Tensor) -> Tensor:
    """Returns the indices of the tokens of the mask, in an order that depends on their keys alone."""
    index = mask_N.nonzero()[:, 0]
    return index[(keys_N[index] * KNUTH % 2**32).argsort(stable=True)]


def select_for_clip_cov(batch: RolloutBatch, params: PolicyLossSettings) -> Tensor:
    """Returns the tokens of an optimizer step that `clip_cov` leaves out."""
    return clip_cov_tokens(
        batch.start_logprobs_N,
        batch.filled("advantages_N"),
        batch.action_mask_N,
        share=params.cov_share,
        limits=params.cov_range,
        keys_N=_keys(batch),
    )


def select_for_kl_cov(batch: RolloutBatch, params: PolicyLossSettings) -> Tensor:
    """Returns the tokens of an optimizer step that `kl_cov` penalises."""
    return kl_cov_tokens(
        batch.start_logprobs_N,
        batch.filled("advantages_N"),
        batch.action_mask_N,
        share=params.cov_share,
        keys_N=_keys(batch),
    )


def _keys(batch: RolloutBatch) -> Tensor:
    return token_keys(batch.sample_ids_S, batch.lengths_S, batch.positions_N, batch.turn_ids_N)


def token_keys(sample_ids_S: Tensor, lengths_S: Tensor, positions_N: Tensor, turn_ids_N: Tensor) -> Tensor:
    """Returns a number for each token that does not depend on where its sequence lies in the batch. No two tokens that
    a rollout sampled have the same: branches have positions in common, but no turns."""
    return torch.repeat_interleave(sample_ids_S, lengths_S) * 1_000_003 + positions_N + turn_ids_N * TURN_STRIDE
