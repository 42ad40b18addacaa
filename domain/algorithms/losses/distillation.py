"""Divergences between a teacher and a student, of next-token distributions or of spans of text, and the objectives
that sum them.

`divergence` is of log-probs over B outcomes at each of A places: the vocabulary, or some tokens and, as one more
outcome, all the others (`with_rest`). The second is the divergence of a coarser distribution: at least 0, at most that
of the whole vocabulary, and 0 for equal models. So is that of a span and all else (`span_divergence`)."""

import math

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.algorithms.losses.supervised import SupervisedObjective
from rollgrad.domain.batches.examples import DemonstrationBatch
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores

MIN_REST = 1e-7
"""Probability of the other tokens below which it is held: rounding may leave less than nothing."""


def with_rest(logprobs_AK: Tensor) -> Tensor:
    """Adds, as the last outcome, the log-probability of all tokens that are not among the K given: [A, K + 1]."""
    rest_A1 = (1 - logprobs_AK.exp().sum(1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([logprobs_AK, rest_A1.log()], dim=1)


def divergence(teacher_AB: Tensor, student_AB: Tensor, *, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of each place, [A]: beta KL(T || M) + (1 - beta) KL(S || M), with T the
    teacher, S the student and M = beta T + (1 - beta) S (Agarwal et al. 2023, "GKD", arXiv:2306.13649, eq. 1). At the
    ends it is the limit, up to scale: the forward KL(T || S) at 0, the reverse KL(S || T) at 1.

    Raises:
        ValueError: `beta` is not from 0 to 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}: it must be from 0 (forward KL) to 1 (reverse KL).")
    if beta == 0:
        return _kl(teacher_AB, student_AB)
    if beta == 1:
        return _kl(student_AB, teacher_AB)
    mixture_AB = torch.logaddexp(teacher_AB + math.log(beta), student_AB + math.log1p(-beta))
    return beta * _kl(teacher_AB, mixture_AB) + (1 - beta) * _kl(student_AB, mixture_AB)


def span_divergence(
    logprobs_N: Tensor, teacher_N: Tensor, mask_N: Tensor, *, beta: float, temperature: float
) -> Tensor:
    """Divergence of each span of text, at its last token, 0 elsewhere. It is of two outcomes, that the span follows
    (probability p^(1/temperature)) or anything else. This is approximate likelihood matching (Minixhofer et al. 2025,
    arXiv:2503.20083) of all aligned chunks, without its debiasing, for models with different tokens.

    Args:
        logprobs_N: the student's log-prob of each token.
        teacher_N: `span_logprobs_N`, by which spans are known.
        mask_N: trained tokens.
        beta: weight between the two directions of the KL, as in `divergence`.
        temperature: brings the probabilities of long spans nearer to 1, so that they count.
    """
    ends_N = mask_N & ~teacher_N.isnan()
    compared_N = ends_N & (teacher_N <= 0)
    span_N = ends_N.cumsum(0) - ends_N.long()
    own_N = torch.where(mask_N, logprobs_N, 0.0)
    own_P = own_N.new_zeros(len(own_N) + 1).index_add(0, span_N, own_N)[span_N[compared_N]]
    found_P = divergence(
        _follows_or_not(teacher_N[compared_N], temperature), _follows_or_not(own_P, temperature), beta=beta
    )
    return torch.zeros_like(own_N).masked_scatter(compared_N, found_P)


def _follows_or_not(logprobs_P: Tensor, temperature: float) -> Tensor:
    """Returns log-probs of both outcomes, [P, 2]. A span that is certain is held below that, where log(0) would be."""
    follows_P = logprobs_P.clamp(max=-MIN_REST) / temperature
    return torch.stack([follows_P, (-torch.expm1(follows_P)).log()], dim=1)


def _kl(p_AB: Tensor, q_AB: Tensor) -> Tensor:
    return (p_AB.exp() * (p_AB - q_AB)).sum(1)


@frozen(kw_only=True)
class DistillationObjective:
    """Weighted sum of (1 - weight) x nll + weight x temperature^2 x divergence of each token (Hinton et al. 2015,
    arXiv:1503.02531, section 2; the factor temperature^2 keeps the gradient's size). It is a `PolicyObjective` for
    scores that have the divergence from a teacher, which is of logits / temperature."""

    weight: float = 0.5
    temperature: float = 1.0

    def __call__(self, scores: TokenScores, batch: PackedBatch) -> LossOutput:
        """Returns the micro-batch's share, and the metrics of `SupervisedObjective` and `divergence` (nats a token).

        Raises:
            ValueError: the batch has no `loss_weights_N`, or the scores no divergence.
        """
        if scores.divergence_N is None:
            raise ValueError("The scores have no divergence: the model was made without a teacher.")
        supervised = SupervisedObjective()(scores, batch)
        mask_N = batch.action_mask_N
        divergence_N = torch.where(mask_N, scores.divergence_N, 0.0)
        mean = weighted_sum(divergence_N, batch.filled("loss_weights_N"), mask_N)
        loss = (1 - self.weight) * supervised.loss + self.weight * self.temperature**2 * mean
        return LossOutput(loss=loss, metrics={"divergence": mean.detach(), **supervised.metrics})


@frozen(kw_only=True)
class SpanObjective:
    """Weighted sum of (1 - weight) x nll of each token and weight x temperature x `span_divergence`, whose gradient has
    the same size at any high temperature with that factor; a `PolicyObjective` for a batch with `span_logprobs_N`."""

    weight: float = 0.5
    beta: float = 0.0
    temperature: float = 1.0

    def __call__(self, scores: TokenScores, batch: DemonstrationBatch) -> LossOutput:
        """Returns the micro-batch's share, and the metrics of `SupervisedObjective` and `divergence` (nats a token).

        Raises:
            ValueError: the batch has no `loss_weights_N` or no `span_logprobs_N`.
        """
        supervised = SupervisedObjective()(scores, batch)
        mask_N = batch.action_mask_N
        divergence_N = span_divergence(
            scores.logprobs_N,
            batch.filled("span_logprobs_N"),
            mask_N,
            beta=self.beta,
            temperature=self.temperature,
        )
        mean = weighted_sum(divergence_N, batch.filled("loss_weights_N"), mask_N)
        loss = (1 - self.weight) * supervised.loss + self.weight * self.temperature * mean
        return LossOutput(loss=loss, metrics={"divergence": mean.detach(), **supervised.metrics})
