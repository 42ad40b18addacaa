"""Aggregation of token losses into one number, by weights that are fixed for a whole optimizer step.

Invariant: `loss_weights` is given every sample of the step, of all processes, before the step is split. The loss is
then the plain sum of weight x token loss, so any split, order, packing or sharding of the same samples gives the same
gradient.
"""

import torch
from torch import Tensor

from rollgrad.domain.batches.by_sequence import counts, spread


def loss_weights(
    mode: str,
    *,
    action_mask_N: Tensor,
    lengths_S: Tensor,
    group_ids_S: Tensor,
    rollout_ids_S: Tensor,
    max_length: int,
) -> Tensor:
    """Returns the float32 weight of each token: 0 outside actions, and everywhere if there are no actions.

    A paper's "sequence" is a rollout here: one that branched weighs no more than one in a single piece.

    Args:
        mode: `token_mean` (DAPO, eq. 8): mean over action tokens. `sequence_mean` (GRPO, eq. 3): mean over rollouts
            that have actions of their token mean. `prompt_mean`: mean over groups of the mean over the group's action
            tokens. `constant_length` (Dr. GRPO, section 3.2): sum over tokens / `max_length`, mean over rollouts.
            `sequence_sum` (LUSPO, Liu et al. 2026, arXiv:2602.05261): sum over tokens, mean over rollouts.
            `token_sum`: sum over action tokens (Tinker; verl's token-sum).
        action_mask_N: bool.
        lengths_S: tokens of each sequence.
        group_ids_S: group of each sequence.
        rollout_ids_S: rollout of each sequence, from 0 (`domain.batches.packed.rollout_ids`).
        max_length: the constant of `constant_length`, in tokens.

    Raises:
        ValueError: unknown `mode`.
    """
    actions_S = counts(action_mask_N, lengths_S)
    actions_R = torch.zeros_like(actions_S).index_add_(0, rollout_ids_S, actions_S)  # 0 beyond the last rollout
    nonempty = (actions_R > 0).sum()
    match mode:
        case "token_mean":
            weights_S = torch.ones_like(actions_S, dtype=torch.float64) / actions_S.sum()
        case "sequence_mean":
            weights_S = 1.0 / (actions_R[rollout_ids_S].double() * nonempty)
        case "prompt_mean":
            _, group_S = torch.unique(group_ids_S, return_inverse=True)
            actions_G = torch.zeros_like(actions_S).index_add_(0, group_S, actions_S)
            weights_S = 1.0 / (actions_G[group_S].double() * (actions_G > 0).sum())
        case "constant_length":
            weights_S = torch.ones_like(actions_S, dtype=torch.float64) / (nonempty * max_length)
        case "sequence_sum":
            weights_S = torch.ones_like(actions_S, dtype=torch.float64) / nonempty
        case "token_sum":
            weights_S = torch.ones_like(actions_S, dtype=torch.float64)
        case _:
            raise ValueError(
                f"Unknown aggregation {mode!r}: use token_mean, sequence_mean, prompt_mean, constant_length, "
                "sequence_sum or token_sum."
            )
    # Rollouts without actions have infinite weights here, which the mask drops.
    return spread(weights_S.float(), lengths_S, action_mask_N)


def weighted_sum(token_loss_N: Tensor, weights_N: Tensor, action_mask_N: Tensor) -> Tensor:
    """Returns the sum of weight x token loss over action tokens; a masked value has no effect, not even NaN."""
    return (torch.where(action_mask_N, token_loss_N, 0.0) * weights_N).sum()
