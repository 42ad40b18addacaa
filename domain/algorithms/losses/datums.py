"""Losses of datums: sums over tokens, neither normalised nor averaged, because a client has put that into weights and
advantages (the Tinker API, tinker-docs.thinkingmachines.ai/tinker/losses).

rho = exp(logprobs - sampled_logprobs), A the advantage, w the weight.
"""

from collections.abc import Callable, Mapping

from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.algorithms.losses.contract import POLICY_LOSSES, PolicyLossInput, PolicyLossParams
from rollgrad.domain.algorithms.losses.ratios import ratio
from rollgrad.domain.batches.datums import DatumBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores

CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
"""Names of constants: the bounds of rho, and the weight of DRO's quadratic term."""

LossConstants = Mapping[str, float]


def cross_entropy(logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    """Returns -log p; the weights come with the sum."""
    return -logprobs_N


def importance_sampling(logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    """Returns -rho A."""
    return -ratio(logprobs_N, batch.sampled_logprobs_N) * batch.advantages_N


def ppo(logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    """Returns -min(rho A, clip(rho, low, high) A) (Schulman et al. 2017, eq. 7)."""
    return _policy_loss("ppo", logprobs_N, batch, constants)


def cispo(logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    """Returns -sg(clip(rho, low, high)) A log p (MiniMax 2025, "MiniMax-M1", eq. 4 and 5)."""
    return _policy_loss("cispo", logprobs_N, batch, constants)


def dro(logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    """Returns -(A log p - beta / 2 (log rho)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    distance_N = (logprobs_N - batch.sampled_logprobs_N).square()
    return 0.5 * constants[BETA] * distance_N - logprobs_N * batch.advantages_N


DatumLoss = Callable[[Tensor, DatumBatch, LossConstants], Tensor]
"""Function from logprobs_N, the batch and the loss's constants to loss_N."""

DATUM_LOSSES: Mapping[str, DatumLoss] = {
    function.__name__: function for function in (cross_entropy, importance_sampling, ppo, cispo, dro)
}

CONSTANTS: Mapping[str, Mapping[str, float | None]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    "cispo": {CLIP_LOW: 0.0, CLIP_HIGH: 4.0},
    "dro": {BETA: None},
}
"""Constants of each loss with their defaults; None has none."""


@frozen(kw_only=True)
class DatumObjective:
    """One of `DATUM_LOSSES` with all its constants. It is a `PolicyObjective`."""

    loss: str
    constants: LossConstants = field(factory=dict)

    def __call__(self, scores: TokenScores, batch: DatumBatch) -> LossOutput:
        """Returns the micro-batch's share: its sum of weight x token loss."""
        loss_N = DATUM_LOSSES[self.loss](scores.logprobs_N, batch, self.constants)
        return LossOutput(loss=weighted_sum(loss_N, batch.filled("loss_weights_N"), batch.action_mask_N))


def _policy_loss(name: str, logprobs_N: Tensor, batch: DatumBatch, constants: LossConstants) -> Tensor:
    inputs = PolicyLossInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=batch.sampled_logprobs_N,
        advantages_N=batch.advantages_N,
        action_mask_N=batch.action_mask_N,
        sequence_N=batch.sequence_ids_N,
        sequences=len(batch),
    )
    clip = 1.0 - constants[CLIP_LOW], constants[CLIP_HIGH] - 1.0
    return POLICY_LOSSES[name](inputs, PolicyLossParams(eps_clip_low_high=clip)).loss_N
