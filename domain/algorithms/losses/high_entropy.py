"""Policy loss at the tokens alone where the policy was most uncertain (Wang et al. 2025, "Beyond the 80/20 Rule",
arXiv:2506.01939, section 5): few tokens of a reasoning decide which way it goes, and these are where to learn."""

import math

from torch import Tensor

ROUNDING = 9
"""Decimal places of a place in the order of tokens, so that a product such as (1 - 0.7) x 10 counts as 3."""

SAME = 2.0**-16
"""Nats within which entropies are equal: samples that begin alike have one entropy, which is rounded in float32 in
another place in each pass and row."""


def high_entropy_tokens(entropies_N: Tensor, action_mask_N: Tensor, share: float) -> Tensor:
    """Returns a mask of the action tokens whose entropy is at least the quantile 1 - `share` of all action tokens' (the
    paper's tau, with the quantile of its `torch.quantile`, interpolated between neighbours). Tokens of equal entropy
    are in or out together, so that neither order nor division of samples matters.

    Args:
        entropies_N: entropies of the policy before the update, nats.
        action_mask_N: bool; the tokens of a whole optimizer step.
        share: greater than 0, at most 1.
    """
    entropies_A = entropies_N[action_mask_N]
    if len(entropies_A) == 0:
        return action_mask_N
    # Of an interpolated threshold only the neighbour above matters. torch.quantile takes 16 million values at most.
    place = math.ceil(round((1 - share) * (len(entropies_A) - 1), ROUNDING))
    threshold = entropies_A.kthvalue(place + 1).values
    return action_mask_N & (entropies_N >= threshold - SAME)
