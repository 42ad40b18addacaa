"""Datums: sequences as clients of a training API send them, with the token to predict after each of their tokens.

Invariant: a packed datum has one token more than the datum, so that what is predicted after its last token has a place,
too. What a client asks for after the token at place t is at place t + 1, as in every packed batch.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch


@frozen(kw_only=True, eq=False)
class Datum:
    """A sequence of T tokens, at least one. What is not tokens is float32."""

    tokens_T: Tensor
    """Int64: tokens that the model reads."""
    targets_T: Tensor
    """Int64: tokens whose log-probs count, each after the token at its place."""
    weights_T: Tensor
    """Weights of the token losses."""
    sampled_logprobs_T: Tensor
    """For losses of policies: log-probs under the sampling distribution; 0 for cross-entropy."""
    advantages_T: Tensor
    """For losses of policies; 0 for cross-entropy."""


@frozen(kw_only=True, eq=False)
class DatumBatch(PackedBatch):
    """Packed datums. Every token but the first of a sequence is an action; `targets_N` int64 is the token whose
    log-prob counts there, `loss_weights_N` the weight of its loss."""

    targets_N: Tensor
    sampled_logprobs_N: Tensor
    advantages_N: Tensor

    @property
    def predicted_N(self) -> Tensor:
        """Tokens whose log-probs are computed."""
        return self.targets_N


def pack_datums(datums: Sequence[Datum]) -> DatumBatch:
    """Lays datums end to end. All are one group: what some begin with alike, such as the prompt of several samples, is
    computed once.

    Raises:
        ValueError: `datums` is empty.
    """
    if not datums:
        raise ValueError("Nothing to pack: a batch holds at least one datum.")
    lengths_S = torch.tensor([len(datum.tokens_T) + 1 for datum in datums])
    return DatumBatch(
        tokens_N=torch.cat([part for datum in datums for part in (datum.tokens_T, datum.targets_T[-1:])]),
        action_mask_N=_shifted([torch.ones(len(datum.tokens_T), dtype=torch.bool) for datum in datums]),
        lengths_S=lengths_S,
        prompt_lengths_S=torch.ones_like(lengths_S),
        group_ids_S=torch.zeros_like(lengths_S),
        loss_weights_N=_shifted([datum.weights_T for datum in datums]),
        targets_N=_shifted([datum.targets_T for datum in datums]),
        sampled_logprobs_N=_shifted([datum.sampled_logprobs_T for datum in datums]),
        advantages_N=_shifted([datum.advantages_T for datum in datums]),
    )


def of_datums(values_N: Tensor, batch: DatumBatch) -> list[Tensor]:
    """Returns a column of a packed batch as one [T] a datum."""
    return [values_T[1:] for values_T in torch.split(values_N, batch.lengths_S.tolist())]


def _shifted(columns: Sequence[Tensor]) -> Tensor:
    """Returns columns [T] as one, each after a 0 at the place of its sequence's first token."""
    return torch.cat([part for column_T in columns for part in (column_T.new_zeros(1), column_T)])
