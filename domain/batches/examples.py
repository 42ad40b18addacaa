"""Examples laid end to end as batches, with the weights of one optimizer step.

Invariant: weights are fixed for the whole step before it is split, and add up to 1, so that any split gives the same
gradient.
"""

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.episodes.trajectory import NO_VERSION

CHOSEN, REJECTED = 0, 1
"""`sample_ids_S` of the two replies of a pair."""


def pack_sequences(
    sequences: Sequence[WeightedTokens], *, group_ids: Sequence[int], sample_ids: Sequence[int]
) -> PackedBatch:
    """Lays sequences end to end; `loss_weights_N` are the tokens' own weights, not yet those of a step.

    Args:
        sequences: at least one.
        group_ids: of each sequence; neighbours of one group with the same prompt share its forward pass.
        sample_ids: of each sequence.
    """
    lengths_S = torch.tensor([len(sequence) for sequence in sequences])
    weights_N = torch.cat([sequence.weights_T for sequence in sequences]).float()
    trained_N, total = weights_N > 0, int(lengths_S.sum())
    starts_S = lengths_S.cumsum(0) - lengths_S
    return PackedBatch(
        tokens_N=torch.cat([sequence.token_ids_T for sequence in sequences]),
        positions_N=torch.arange(total) - torch.repeat_interleave(starts_S, lengths_S),
        action_mask_N=trained_N,
        turn_ids_N=torch.where(trained_N, 0, -1),
        rewards_N=torch.zeros(total),
        rollout_logprobs_N=torch.zeros(total),
        versions_N=torch.full((total,), NO_VERSION, dtype=torch.int32),
        lengths_S=lengths_S,
        prompt_lengths_S=torch.tensor([sequence.prompt_length for sequence in sequences]),
        group_ids_S=torch.tensor(group_ids),
        sample_ids_S=torch.tensor(sample_ids),
        scores_S=torch.zeros(len(sequences)),
        truncated_S=torch.zeros(len(sequences), dtype=torch.bool),
        loss_weights_N=weights_N,
    )


def pack_preferences(pairs: Sequence[Preference]) -> PackedBatch:
    """Lays the pairs of one optimizer step end to end, chosen before rejected; `group_ids_S` is the pair's place in
    `pairs`. `loss_weights_N` is, at each trained token, the pair's share in the sum of all pairs' weights;
    `positive_weights_N` that of each chosen token in the weighted mean over the tokens of all chosen replies.

    Raises:
        ValueError: all pairs have the weight 0.
    """
    batch = pack_sequences(
        [reply for pair in pairs for reply in (pair.chosen, pair.rejected)],
        group_ids=[index for index in range(len(pairs)) for _ in range(2)],
        sample_ids=[CHOSEN, REJECTED] * len(pairs),
    )
    weights_P = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    weights_N = weights_P[batch.group_ids_S][batch.sequence_ids_N]
    chosen_N = batch.action_mask_N & (batch.sample_ids_S == CHOSEN)[batch.sequence_ids_N]
    return evolve(
        batch,
        loss_weights_N=_shares(weights_N, weights_P.sum(), batch.action_mask_N),
        positive_weights_N=_shares(weights_N, weights_N[chosen_N].sum(), chosen_N),
    )


def _shares(weights_N: Tensor, total: Tensor, mask_N: Tensor) -> Tensor:
    if float(total) <= 0:
        raise ValueError("All examples of an optimizer step have the weight 0: there is nothing to learn from.")
    return torch.where(mask_N, weights_N / total, 0.0).float()
