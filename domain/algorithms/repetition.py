"""Rollouts that got stuck in a repetition, found by the certainty with which they were sampled."""

import math

import torch
from torch import Tensor

CERTAIN = 0.99
"""Probability above which a token counts as part of a repetition (MiniMax-M1, MiniMax 2025, arXiv:2506.13585, section
3.2)."""


def repeats(logprobs_N: Tensor, action_mask_N: Tensor, lengths_S: Tensor, window: int) -> Tensor:
    """Returns, for each sequence, whether it has at least `window` action tokens in a row that were each sampled with a
    probability above `CERTAIN`. A policy that repeats itself is hardly ever in doubt; in a text that makes progress it
    is in doubt every few words. What an environment wrote interrupts a row.

    Args:
        logprobs_N: log-probs under the policy that sampled.
        action_mask_N: bool.
        lengths_S: tokens of each sequence.
        window: number of tokens, at least 1.
    """
    certain_N = action_mask_N & (logprobs_N > math.log(CERTAIN))
    place_N = torch.arange(len(certain_N))
    starts_S = lengths_S.cumsum(0) - lengths_S
    last_N = torch.where(certain_N, -1, place_N).cummax(0).values  # latest token before which a row cannot begin
    begin_N = torch.maximum(last_N, torch.repeat_interleave(starts_S - 1, lengths_S))
    long_N = place_N - begin_N >= window
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    return torch.zeros(len(lengths_S), dtype=torch.bool).index_put_((sequence_N[long_N],), torch.tensor(True))
