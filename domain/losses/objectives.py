"""What a model is told to minimise: callables over one micro-batch that return its share of the step's loss."""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.losses.aggregation import weighted_sum
from rollgrad.domain.losses.kl import kl_estimate
from rollgrad.domain.losses.policy import ppo_clip
from rollgrad.domain.losses.value import value_loss
from rollgrad.domain.ports.models import LossOutput, TokenScores


@frozen(kw_only=True)
class ClippedPolicyObjective:
    """PPO's clipped loss, plus `kl_coef` x KL to the reference, minus `entropy_coef` x entropy; a `PolicyObjective`."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __call__(self, scores: TokenScores, batch: PackedBatch) -> LossOutput:
        """The micro-batch's share; a missing `old_logprobs_N` means a ratio of exactly 1.

        Raises:
            ValueError: the batch lacks weights, advantages, or (for a KL term) reference log-probs.
        """
        weights_N = _column(batch, "loss_weights_N")
        mask_N = batch.action_mask_N
        logprobs_N = _masked(scores.logprobs_N, mask_N)
        old_N = logprobs_N.detach() if batch.old_logprobs_N is None else _column(batch, "old_logprobs_N")
        policy = ppo_clip(
            logprobs_N,
            old_N,
            _column(batch, "advantages_N"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        policy_loss = weighted_sum(policy.loss_N, weights_N, mask_N)
        entropy = weighted_sum(_masked(scores.entropy_N, mask_N), weights_N, mask_N)
        loss = policy_loss - self.entropy_coef * entropy if self.entropy_coef else policy_loss
        metrics = {
            "policy_loss": policy_loss,
            "entropy": entropy,
            "approx_kl": weighted_sum(kl_estimate(old_N, logprobs_N, "k3"), weights_N, mask_N),
            "ratio_mean": weighted_sum(policy.ratio_N, weights_N, mask_N),
            "clip_low_share": weighted_sum(policy.clipped_low_N.float(), weights_N, mask_N),
            "clip_high_share": weighted_sum(policy.clipped_high_N.float(), weights_N, mask_N),
        }
        if self.kl_coef:
            kl_N = kl_estimate(logprobs_N, _column(batch, "ref_logprobs_N"), self.kl_estimator)
            metrics["ref_kl"] = weighted_sum(kl_N, weights_N, mask_N)
            loss = loss + self.kl_coef * metrics["ref_kl"]
        return LossOutput(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


@frozen(kw_only=True)
class ClippedValueObjective:
    """The critic's squared error with values clipped around their old estimates; a `ValueObjective`."""

    clip: float | None

    def __call__(self, values_N: Tensor, batch: PackedBatch) -> LossOutput:
        """The micro-batch's share.

        Raises:
            ValueError: the batch lacks weights, old values or returns.
        """
        weights_N, old_N = _column(batch, "value_weights_N"), _column(batch, "values_N")
        values_N = _masked(values_N, batch.action_mask_N)
        loss_N = value_loss(values_N, old_N, _column(batch, "returns_N"), clip=self.clip)
        loss = weighted_sum(loss_N, weights_N, batch.action_mask_N)
        metrics = {"value_loss": loss.detach()}
        if self.clip is not None:
            moved_N = ((values_N.detach() - old_N).abs() > self.clip).float()
            metrics["value_clip_share"] = weighted_sum(moved_N, weights_N, batch.action_mask_N)
        return LossOutput(loss=loss, metrics=metrics)


def _column(batch: PackedBatch, name: str) -> Tensor:
    """The named column, 0 where not an action."""
    column: Tensor | None = getattr(batch, name)
    if column is None:
        raise ValueError(f"The batch has no {name}: fill it in before computing the loss.")
    return _masked(column, batch.action_mask_N)


def _masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """0 where not an action, before anything is computed: a NaN behind a later mask would still reach gradients."""
    return torch.where(mask_N, values_N, 0.0)
