"""Examples laid end to end as batches, with the weights of one optimizer step.

Invariant: weights are fixed for the whole step before it is split, and add up to 1, so that any split gives the same
gradient.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Demonstration, Label, Preference, StepLabels, WeightedTokens
from rollgrad.domain.errors import DataError

CHOSEN, REJECTED = 0, 1
"""`sample_ids_S` of the two replies of a pair."""


@frozen(kw_only=True, eq=False)
class ExampleBatch(PackedBatch):
    """Examples; a unit is one `group_ids_S`. Columns that may be None are filled in where a loss needs them."""

    sample_ids_S: Tensor
    """Int64: tells the sequences of a unit apart."""
    scores_S: Tensor = field(default=Factory(lambda batch: torch.zeros(len(batch.lengths_S)), takes_self=True))
    """Float32: what the data say of each sequence, a label or a margin; 0 by default."""
    ref_logprobs_N: Tensor | None = None
    """Log-probs under the reference."""
    positive_weights_N: Tensor | None = None
    """Weights of a second term of the loss, over the tokens of chosen replies."""
    opposites_S2: Tensor | None = None
    """Numbers that each reply of a pair is compared with, by losses that sort the pairs of the step
    (`domain.algorithms.losses.transport`)."""


def pack_sequences(
    sequences: Sequence[WeightedTokens], *, group_ids: Sequence[int], sample_ids: Sequence[int]
) -> ExampleBatch:
    """Lays sequences end to end; `loss_weights_N` are the tokens' own weights, not yet those of a step.

    Args:
        sequences: the sequences, at least one.
        group_ids: of each sequence; the sequences of one group are a unit, and share the forward pass of an equal
            prompt.
        sample_ids: sample id of each sequence.
    """
    lengths_S = torch.tensor([len(sequence) for sequence in sequences])
    weights_N = torch.cat([sequence.weights_T for sequence in sequences]).float()
    return ExampleBatch(
        tokens_N=torch.cat([sequence.token_ids_T for sequence in sequences]),
        action_mask_N=weights_N > 0,
        lengths_S=lengths_S,
        prompt_lengths_S=torch.tensor([sequence.prompt_length for sequence in sequences]),
        group_ids_S=torch.tensor(group_ids),
        unit_ids_S=torch.tensor(group_ids),
        sample_ids_S=torch.tensor(sample_ids),
        loss_weights_N=weights_N,
        images_S=tuple(s.images for s in sequences) if any(s.images for s in sequences) else (),
    )


@frozen(kw_only=True, eq=False)
class DemonstrationBatch(ExampleBatch):
    """Demonstrations; the branches of each are a unit, none of which the loss compares with another. `span_logprobs_N`
    are as in `Demonstration`, 0 outside of trained tokens; None where no teacher compares spans."""

    units_divisible: ClassVar[bool] = True

    span_logprobs_N: Tensor | None = None


def pack_demonstrations(demonstrations: Sequence[Demonstration], *, sequence_mean: bool = False) -> DemonstrationBatch:
    """Lays the demonstrations of one optimizer step end to end, all branches of each; `group_ids_S` is the place of a
    demonstration among them. `loss_weights_N` is each token's weight, times that of its demonstration, as a share of
    the sum over the step: a mean over its trained tokens where all weigh 1. With `sequence_mean` it is the token's
    share in its demonstration, times that demonstration's share in the step: a mean over demonstrations, long or short,
    of the mean over the trained tokens of each. A teacher's predictions are filled in if all have theirs.

    Raises:
        DataError: all weights are 0.
    """
    places = [place for place, demonstration in enumerate(demonstrations) for _ in demonstration.branches]
    packed = pack_sequences(
        [branch for demonstration in demonstrations for branch in demonstration.branches],
        group_ids=places,
        sample_ids=[number for demonstration in demonstrations for number in range(len(demonstration.branches))],
    )
    weights_D = torch.tensor([demonstration.weight for demonstration in demonstrations], dtype=torch.float64)
    own_N, places_N = packed.filled("loss_weights_N").double(), packed.group_ids_S[packed.sequence_ids_N]
    if sequence_mean:
        own_N = own_N / torch.zeros_like(weights_D).index_add(0, places_N, own_N)[places_N]
    weights_N = own_N * weights_D[places_N]
    columns: dict[str, Any] = {name: column for name, _, column in packed.columns()}
    shares_N = _shares(weights_N, weights_N.sum(), packed.action_mask_N)
    return DemonstrationBatch(
        **{**columns, "loss_weights_N": shares_N},
        images_S=packed.images_S,
        teacher_ids_NK=_at_trained([each.teacher_ids_AK for each in demonstrations], packed),
        teacher_logprobs_NK=_at_trained([each.teacher_logprobs_AB for each in demonstrations], packed),
        span_logprobs_N=_at_trained([each.span_logprobs_A for each in demonstrations], packed),
    )


def pack_preferences(pairs: Sequence[Preference]) -> ExampleBatch:
    """Lays the pairs of one optimizer step end to end, chosen before rejected; `group_ids_S` is the pair's place in
    `pairs`. `ref_logprobs_N` is filled in if all pairs have theirs. `loss_weights_N` is, at each trained token, the
    pair's share in the sum of all pairs' weights; `positive_weights_N` that of each chosen token in the weighted mean
    over the tokens of all chosen replies.

    Raises:
        DataError: all pairs have the weight 0.
    """
    batch, weights_N, total = _pack_pairs(pairs)
    chosen_N = batch.action_mask_N & (batch.sample_ids_S == CHOSEN)[batch.sequence_ids_N]
    return evolve(
        batch,
        ref_logprobs_N=_at_trained([pair.ref_logprobs_A for pair in pairs], batch),
        loss_weights_N=_shares(weights_N, total, batch.action_mask_N),
        positive_weights_N=_shares(weights_N, weights_N[chosen_N].sum(), chosen_N),
    )


def _pack_pairs(pairs: Sequence[Preference]) -> tuple[ExampleBatch, Tensor, Tensor]:
    """Returns the replies of pairs end to end, chosen before rejected, the pair's weight at each token, and the sum of
    all pairs' weights."""
    batch = pack_sequences(
        [reply for pair in pairs for reply in (pair.chosen, pair.rejected)],
        group_ids=[index for index in range(len(pairs)) for _ in range(2)],
        sample_ids=[CHOSEN, REJECTED] * len(pairs),
    )
    weights_P = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    return batch, weights_P[batch.group_ids_S][batch.sequence_ids_N], weights_P.sum()


def pack_labels(labels: Sequence[Label]) -> ExampleBatch:
    """Lays the labelled replies of one optimizer step end to end; `group_ids_S` is the place of each in `labels`, and
    `scores_S` 1 where it is desirable. `ref_logprobs_N` is filled in if all have theirs. `loss_weights_N` is, at each
    trained token, the reply's share in the sum of all weights.

    Raises:
        DataError: all replies have the weight 0.
    """
    batch = pack_sequences(
        [label.reply for label in labels], group_ids=range(len(labels)), sample_ids=[0] * len(labels)
    )
    weights_S = torch.tensor([label.weight for label in labels], dtype=torch.float64)
    return evolve(
        batch,
        scores_S=torch.tensor([float(label.desirable) for label in labels]),
        ref_logprobs_N=_at_trained([label.ref_logprobs_A for label in labels], batch),
        loss_weights_N=_shares(weights_S[batch.sequence_ids_N], weights_S.sum(), batch.action_mask_N),
    )


def mismatches(prompts: Sequence[Hashable]) -> list[int]:
    """Returns for each reply of an optimizer step, by its prompt, the place of the reply whose completion is put after
    that prompt: the one before it (the last, for the first), as in TRL.

    Where some prompt would get a completion of its own that way, replies to one prompt are laid side by side, and the
    completion comes from as many places before as the largest such group has replies. A prompt of more than half of the
    replies gets as few completions of its own as there can be.
    """
    count = len(prompts)
    before = [place - 1 if place else count - 1 for place in range(count)]
    if all(prompts[place] != prompts[other] for place, other in enumerate(before)):
        return before
    groups: dict[Hashable, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(place)
    together = [place for group in groups.values() for place in group]
    largest = max(map(len, groups.values()))
    shift = min(largest, count - largest) or 1  # never a reply's own completion
    taken = dict(zip(together, [*together[-shift:], *together[:-shift]], strict=True))
    return [taken[place] for place in range(count)]


def mismatched(labels: Sequence[Label], *, longest: int | None = None) -> list[WeightedTokens]:
    """Returns the prompt of each label with the completion of another, as KTO measures its distance from the reference
    (Ethayarajh et al. 2024, arXiv:2402.01306, section 4); of which one, `mismatches` says.

    Args:
        labels: labels of one optimizer step, in their order.
        longest: number of tokens that a sequence is cut to; None cuts none.
    """
    others = mismatches([label.reply.prompt_key for label in labels])
    return [
        other_completion(label.reply, labels[other].reply, longest=longest)
        for label, other in zip(labels, others, strict=True)
    ]


def other_completion(asked: WeightedTokens, answered: WeightedTokens, *, longest: int | None) -> WeightedTokens:
    """Returns what precedes the first trained token of `asked`, and after it what follows that of `answered`, each with
    its images; of the end as much as `longest` leaves, without the tokens of an image that would be cut."""
    own, other = asked.first_trained, answered.first_trained
    images = [placed for placed in asked.images if placed.stop <= own]
    images += [placed.moved(own - other) for placed in answered.images if placed.start >= other]
    end = min(longest or math.inf, own + len(answered) - other)
    stop = int(min([end, *(placed.start for placed in images if placed.stop > end)]))
    return WeightedTokens(
        token_ids_T=torch.cat([asked.token_ids_T[:own], answered.token_ids_T[other:]])[:stop],
        weights_T=torch.cat([torch.zeros(own), answered.weights_T[other:]])[:stop],
        prompt_length=own,
        images=tuple(placed for placed in images if placed.stop <= stop),
    )


def pack_comparisons(pairs: Sequence[Preference], *, margins: bool = False) -> ExampleBatch:
    """Lays the pairs of one optimizer step end to end as `pack_preferences` does, for a reward model: of each reply the
    last token alone is an action, at which its score is read. `scores_S` is the pair's margin with `margins`, else 0.

    Raises:
        DataError: all pairs have the weight 0.
    """
    batch, weights_N, total = _pack_pairs(pairs)
    last_N = torch.zeros(batch.token_count, dtype=torch.bool).index_fill(0, batch.starts_S + batch.lengths_S - 1, True)
    margins_P = torch.tensor([pair.margin if margins else 0.0 for pair in pairs])
    return evolve(
        batch,
        action_mask_N=last_N,
        scores_S=margins_P.repeat_interleave(2),
        loss_weights_N=_shares(weights_N, total, last_N),
    )


def _at_trained(columns: Sequence[Tensor | None], batch: PackedBatch) -> Tensor | None:
    """Returns the rows of each example's trained tokens at their places in the batch, 0 elsewhere; None if an example
    has none."""
    known = [rows_A for rows_A in columns if rows_A is not None]
    if len(known) < len(columns):
        return None
    return batch.placed(torch.cat(known))


@frozen(kw_only=True, eq=False)
class StepBatch(ExampleBatch):
    """Solutions whose steps are labelled: the last token of each step is an action, and `labels_N` float32 the
    probability that the step is right."""

    labels_N: Tensor


def pack_steps(solutions: Sequence[StepLabels]) -> StepBatch:
    """Lays the labelled solutions of one optimizer step end to end. `loss_weights_N` is, at the last token of each
    labelled step, the solution's weight as a share of the sum over all steps.

    Raises:
        DataError: all solutions have the weight 0.
    """
    marked = []
    for solution in solutions:
        ends_T = torch.zeros(len(solution)).index_fill(0, torch.tensor(solution.ends), 1.0)
        marked.append(
            WeightedTokens(token_ids_T=solution.token_ids_T, weights_T=ends_T, prompt_length=1, images=solution.images)
        )
    packed = pack_sequences(marked, group_ids=range(len(solutions)), sample_ids=[0] * len(solutions))
    weights_S = torch.tensor([solution.weight for solution in solutions], dtype=torch.float64)
    weights_N = torch.where(packed.action_mask_N, weights_S[packed.sequence_ids_N], 0.0)
    labels_N = torch.zeros(packed.token_count)
    labels_N[packed.action_mask_N] = torch.tensor([label for solution in solutions for label in solution.labels])
    columns: dict[str, Any] = {name: column for name, _, column in packed.columns()}
    shares_N = _shares(weights_N, weights_N.sum(), packed.action_mask_N)
    own = {"loss_weights_N": shares_N, "labels_N": labels_N, "images_S": packed.images_S}
    return StepBatch(**columns | own)


def _shares(weights_N: Tensor, total: Tensor, mask_N: Tensor) -> Tensor:
    if float(total) <= 0:
        raise DataError(
            "All examples of an optimizer step, or of held-out data, have the weight 0, so that nothing can be learned "
            "or measured: give some a weight above 0."
        )
    return torch.where(mask_N, weights_N / total, 0.0).float()
