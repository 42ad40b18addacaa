"""Losses of supervised fine-tuning, per token, and the objective that sums them.

Metrics are sums of weight x value, as the loss is; `loss_weights_N` add up to 1 over an optimizer step, so that the
sums are means.
"""

import math

import torch
from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.batches.metrics import Mean
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores

SUPERVISED_LOSSES = ("nll", "dft")
"""Names that `supervised_loss` knows."""


def supervised_loss(name: str, logprobs_N: Tensor) -> Tensor:
    """Loss of each token from its log-prob.

    nll: -log p, the cross-entropy. dft: -sg(p) log p, which takes the weight 1/p out of the gradient seen as a policy
    gradient (Wu et al. 2025, "On the Generalization of SFT", arXiv:2508.05629; sg stops the gradient).

    Raises:
        ValueError: unknown `name`.
    """
    match name:
        case "nll":
            return -logprobs_N
        case "dft":
            return -logprobs_N.detach().exp() * logprobs_N
    raise ValueError(f"Unknown loss {name!r}: use {' or '.join(SUPERVISED_LOSSES)}.")


def smoothed_nll(logprobs_N: Tensor, mean_logprobs_N: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log p - e mean_v log p_v: the cross-entropy with the one-hot target mixed with the uniform distribution
    over the vocabulary (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Args:
        logprobs_N: log-prob of each token.
        mean_logprobs_N: mean over the vocabulary of the log-probs at the same places.
        label_smoothing: e, from 0 to below 1.
    """
    return -(1 - label_smoothing) * logprobs_N - label_smoothing * mean_logprobs_N


@frozen(kw_only=True)
class SupervisedObjective:
    """Weighted sum of the tokens' losses; `loss` is from `SUPERVISED_LOSSES`, and nll may have `label_smoothing` as in
    `smoothed_nll`; a `PolicyObjective`. `bytes_V` is how many bytes each token of the vocabulary writes, None where
    nobody knows."""

    loss: str = "nll"
    label_smoothing: float = 0.0
    bytes_V: Tensor | None = field(default=None, eq=False, repr=False)

    def __call__(self, scores: TokenScores, batch: PackedBatch) -> LossOutput:
        """Returns the micro-batch's share. Metrics are `nll` (nats a token), `entropy`, `accuracy` (share of tokens
        that are the most likely ones) if the scores have it, and with `bytes_V` the `bits_per_byte` of the trained
        text, which ignores the weights of rows.

        Raises:
            ValueError: the batch has no `loss_weights_N`, or the scores none of what smoothing reads.
        """
        weights_N, mask_N = batch.filled("loss_weights_N"), batch.action_mask_N
        # Masked before anything is computed: a NaN behind a later mask would still reach gradients.
        logprobs_N = torch.where(mask_N, scores.logprobs_N, 0.0)
        losses_N = supervised_loss(self.loss, logprobs_N)
        if self.label_smoothing:
            if scores.mean_logprobs_N is None:
                raise ValueError("Label smoothing reads mean_logprobs_N, which the scores do not have.")
            mean_logprobs_N = torch.where(mask_N, scores.mean_logprobs_N, 0.0)
            losses_N = smoothed_nll(logprobs_N, mean_logprobs_N, self.label_smoothing)
        loss = weighted_sum(losses_N, weights_N, mask_N)
        metrics: dict[str, Tensor | float] = {
            "nll": -weighted_sum(logprobs_N.detach(), weights_N, mask_N),
            "entropy": weighted_sum(scores.entropy_N.detach(), weights_N, mask_N),
        }
        if scores.correct_N is not None:
            metrics["accuracy"] = weighted_sum(scores.correct_N, weights_N, mask_N)
        if self.bytes_V is not None:
            counted_N = mask_N & (weights_N > 0)  # a process without samples has a copy that weighs nothing
            bits = -logprobs_N.detach()[counted_N].double().sum() / math.log(2)
            tokens = batch.tokens_N[counted_N]
            known = tokens[tokens < len(self.bytes_V)]  # a model may have more tokens than its tokenizer
            metrics["bits_per_byte"] = Mean(bits, self.bytes_V[known].sum())
        return LossOutput(loss=loss, metrics=metrics)
