"""Objectives that a model minimises: callables that return one micro-batch's share of the optimizer step's loss.

Every token's weight is fixed for the whole step before it is split (`aggregation`), so shares simply add up. Metrics
are sums with the same weights: over the micro-batches of a step they add up to weighted means. For example, `entropy`
of a step of 100 action tokens in token_mean is sum(entropy) / 100, of which a micro-batch of 40 tokens returns its own
sum / 100.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.algorithms.catalogue import policy_loss_traits
from rollgrad.domain.algorithms.columns import check_tokens
from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.algorithms.losses.contract import POLICY_LOSSES, PolicyLoss, PolicyLossInput, PolicyLossParams
from rollgrad.domain.algorithms.losses.corrections import correction_weights, interpolated_proximal
from rollgrad.domain.algorithms.losses.kl import kl_estimate
from rollgrad.domain.algorithms.losses.ratios import ratio
from rollgrad.domain.algorithms.losses.value import value_loss
from rollgrad.domain.algorithms.settings import CorrectionSettings
from rollgrad.domain.batches.metrics import Total
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import LossOutput, TokenScores

REFERENCE_KL = "ref_kl"
"""Name of the metric that is the KL term of the policy's loss before its weight, a mean over tokens."""


@frozen(kw_only=True)
class PolicyLossObjective:
    """The loss of the policy: a `PolicyObjective`.

    It is a policy loss, weighted by an off-policy correction, plus `kl_coef` x KL, minus `entropy_coef` x entropy, plus
    `positive_nll_coef` x the negative log-likelihood of replies that passed (VAPO, Yue et al. 2025, eq. 10). Where the
    batch has `learned_N`, the policy loss, and with it what centering takes out, is 0 at all other tokens; KL, entropy
    and likelihood are of all.
    """

    loss: str = "ppo"
    """Key of `POLICY_LOSSES`."""
    params: PolicyLossParams = field(factory=PolicyLossParams)
    settings: Any = None
    """Settings of the loss's own; None takes their defaults."""
    correction: CorrectionSettings | None = None
    """None for none."""
    bypass: bool = False
    """Argument of `correction_weights`."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    """As for `kl_estimate`; or `full` for the divergence of the scores, which is exact."""
    kl_against: str = "reference"
    """`reference`; or `rollout` for the policy that sampled."""
    entropy_coef: float = 0.0
    positive_nll_coef: float = 0.0
    version: int | None = None
    """Version of the policy under training. If given, the proximal log-probs are interpolated between those of the
    sampling policy and of the current one."""
    centred: bool = False
    """Whether each token's gradient is centred (score centering, `centering.py`), by scores that have the mean."""

    def __call__(self, scores: TokenScores, batch: RolloutBatch) -> LossOutput:
        """Returns the micro-batch's share; a missing `old_logprobs_N` means a ratio of exactly 1.

        Raises:
            ValueError: the batch lacks weights, advantages, or (for a KL term) reference log-probs; or the scores lack
                the divergence, or the mean score.
            ConfigurationError: the loss returned something without a value for each token, or a metric that the update
                itself reports.
        """
        weights_N, mask_N = _column(batch, "loss_weights_N"), batch.action_mask_N
        rollout_N = _column(batch, "rollout_logprobs_N")

        def mean(values_N: Tensor) -> Tensor:
            return weighted_sum(values_N, weights_N, mask_N)

        given = self._loss_input(scores, rollout_N, batch)
        policy = self._policy_loss(given)
        correction_N = self._correction_weights(given, rollout_N, batch)
        token_loss_N = policy.loss_N if correction_N is None else policy.loss_N * correction_N
        loss = mean(_learned(token_loss_N, batch))
        entropy = mean(_masked(scores.entropy_N, mask_N))

        metrics: dict[str, Tensor | float] = {"policy_loss": Total(loss.detach()), "entropy": entropy}
        metrics |= {name: mean(values_N) for name, values_N in _selection(correction_N, batch)}
        metrics |= {name: mean(values_N) for name, values_N in _movement(policy, given, rollout_N)}
        self._check_names(policy, metrics)
        metrics |= {name: mean(values_N.detach().float()) for name, values_N in policy.metrics_N.items()}

        if self.centred:
            # The loss has -A w log pi of the sampled token; centering takes the mean over all tokens out of it.
            mean_score_N, about_centering = _centering(scores, batch)
            loss = loss + mean(_learned(given.advantages_N * mean_score_N, batch))
            metrics |= {name: mean(values_N) for name, values_N in about_centering.items()}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        if self.kl_coef:
            reference_kl = mean(self._divergence(scores, given, rollout_N, batch))
            loss = loss + self.kl_coef * reference_kl
            metrics[REFERENCE_KL] = reference_kl
        if self.positive_nll_coef:
            positive_nll = -weighted_sum(given.logprobs_N, _column(batch, "positive_weights_N"), mask_N)
            loss = loss + self.positive_nll_coef * positive_nll
            metrics["positive_nll"] = Total(positive_nll.detach())

        reported = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        return LossOutput(loss=loss, metrics=reported, clipped_N=policy.clipped_low_N | policy.clipped_high_N)

    def _loss_input(self, scores: TokenScores, rollout_N: Tensor, batch: RolloutBatch) -> PolicyLossInput:
        """Returns what the policy loss reads."""
        logprobs_N = _masked(scores.logprobs_N, batch.action_mask_N)
        return PolicyLossInput(
            logprobs_N=logprobs_N,
            old_logprobs_N=self._proximal(logprobs_N.detach(), rollout_N, batch),
            advantages_N=_column(batch, "advantages_N"),
            action_mask_N=batch.action_mask_N,
            sequence_N=batch.sequence_ids_N,
            sequences=len(batch),
            selected_N=batch.selected_N,
            rollout_logprobs_N=rollout_N,
        )

    def _proximal(self, current_N: Tensor, rollout_N: Tensor, batch: RolloutBatch) -> Tensor:
        """Returns the log-probs of the proximal policy, which the loss's ratio divides by."""
        if self.version is not None:
            return interpolated_proximal(current_N, rollout_N, batch.versions_N, self.version)
        return current_N if batch.old_logprobs_N is None else _column(batch, "old_logprobs_N")

    def _policy_loss(self, given: PolicyLossInput) -> PolicyLoss:
        """Returns what the policy loss makes of each token.

        Raises:
            ConfigurationError: it returned something without a value for each token.
        """
        policy = POLICY_LOSSES[self.loss](given, self.params, *policy_loss_traits(self.loss).own(self.settings))
        columns = {"loss_N": policy.loss_N, "ratio_N": policy.ratio_N, **policy.metrics_N}
        for column, values_N in columns.items():
            check_tokens(f"The policy loss {self.loss}", column, values_N, given.action_mask_N)
        return policy

    def _check_names(self, policy: PolicyLoss, metrics: Mapping[str, object]) -> None:
        """Raises a `ConfigurationError` if the loss names a metric as one of `metrics` is named."""
        taken = metrics.keys() & policy.metrics_N.keys()
        if taken:
            raise ConfigurationError(
                f"The policy loss {self.loss} reports {', '.join(sorted(taken))}, which the update itself reports: "
                "give its metrics_N other names."
            )

    def _correction_weights(self, given: PolicyLossInput, rollout_N: Tensor, batch: RolloutBatch) -> Tensor | None:
        """Returns the factor of each token's loss that corrects for the policy that sampled it; None without a
        correction."""
        if self.correction is None:
            return None
        return correction_weights(
            self.correction,
            # With `bypass` the ratio of the loss is pi / mu already: the gate looks at the current policy.
            logprobs_N=given.logprobs_N if self.bypass else given.old_logprobs_N,
            rollout_logprobs_N=rollout_N,
            advantages_N=given.advantages_N,
            action_mask_N=given.action_mask_N,
            sequence_N=given.sequence_N,
            sequences=given.sequences,
            bypass=self.bypass,
            kept_N=batch.kept_N,
        )

    def _divergence(
        self, scores: TokenScores, given: PolicyLossInput, rollout_N: Tensor, batch: RolloutBatch
    ) -> Tensor:
        """Returns the divergence of the current policy from the one that the KL term holds it to, token by token."""
        if self.kl_estimator == "full":
            if scores.divergence_N is None:
                raise ValueError("The scores have no divergence: the model was made without a teacher.")
            kl_N = _masked(scores.divergence_N, given.action_mask_N)
        else:
            against_N = rollout_N if self.kl_against == "rollout" else _column(batch, "ref_logprobs_N")
            ratio_N = ratio(given.logprobs_N, given.old_logprobs_N)
            kl_N = kl_estimate(given.logprobs_N, against_N, self.kl_estimator, ratio_N)
        return kl_N if batch.taught_S is None else torch.where(batch.taught_S[given.sequence_N], kl_N, 0.0)


def _learned(values_N: Tensor, batch: RolloutBatch) -> Tensor:
    """Returns the values with 0 at tokens that the policy loss leaves out."""
    return values_N if batch.learned_N is None else torch.where(batch.learned_N, values_N, 0.0)


def _selection(correction_N: Tensor | None, batch: RolloutBatch) -> Iterator[tuple[str, Tensor]]:
    """Yields metrics of each token: how much the correction lets it count, and whether it is one of the uncertain
    tokens that alone are learned from."""
    if correction_N is not None:
        yield "correction_weight", correction_N
        yield "correction_dropped_share", (correction_N == 0).float()
    if batch.learned_N is not None:
        yield "high_entropy_share", (batch.learned_N & batch.action_mask_N).float()


def _movement(policy: PolicyLoss, given: PolicyLossInput, rollout_N: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields metrics of each token: how far the policy has moved within the update, and how far apart trainer and
    engine are."""
    old_N = given.old_logprobs_N
    yield "approx_kl", kl_estimate(old_N, given.logprobs_N, "k3")
    yield "ratio_mean", policy.ratio_N
    yield "clip_low_share", policy.clipped_low_N.float()
    yield "clip_high_share", policy.clipped_high_N.float()
    yield "mismatch_kl", kl_estimate(rollout_N, old_N, "k3")
    yield "mismatch_abs", (old_N - rollout_N).abs()
    yield "mismatch_equal_share", (old_N == rollout_N).float()
    weight_N = ratio(old_N, rollout_N)
    yield "mismatch_weight", weight_N
    yield "mismatch_weight_squared", weight_N.square()


def _centering(scores: TokenScores, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean score of each token, and metrics by name: the size of its coefficients, and the mass of the
    sampler's most likely tokens under both policies.

    Raises:
        ValueError: the scores or the batch lack them.
    """
    mask_N = batch.action_mask_N
    if scores.mean_score_N is None or scores.residual_N is None or scores.policy_mass_N is None:
        raise ValueError("The scores have no mean score: the model was made without score centering.")
    return _masked(scores.mean_score_N, mask_N), {
        "centering_residual": _masked(scores.residual_N, mask_N),
        "centering_sampler_mass": _masked(batch.filled("sampler_logprobs_NK").exp().sum(1), mask_N),
        "centering_policy_mass": _masked(scores.policy_mass_N, mask_N),
    }


@frozen(kw_only=True)
class ClippedValueObjective:
    """The critic's squared error with values clipped around their old estimates; a `ValueObjective`."""

    clip: float | None

    def __call__(self, values_N: Tensor, batch: RolloutBatch) -> LossOutput:
        """Returns the micro-batch's share.

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


def _column(batch: RolloutBatch, name: str) -> Tensor:
    """Returns the named column, with 0 outside actions."""
    return _masked(batch.filled(name), batch.action_mask_N)


def _masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sets values outside actions to 0. This comes before any computation: a NaN that is masked only later would still
    reach the gradient, as 0 x NaN."""
    return torch.where(mask_N, values_N, 0.0)
