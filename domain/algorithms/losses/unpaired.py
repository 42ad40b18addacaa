"""Losses of replies that are labelled good or bad one by one, and the objective that sums them.

With r the log-prob of a reply against the reference, r = log pi - log pi_ref.
"""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.batches.metrics import Common, Mean
from rollgrad.domain.ports.models import LossOutput, TokenScores

UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
"""Names that `unpaired_loss` knows."""


def unpaired_loss(name: str, log_ratios_S: Tensor, desirable_S: Tensor, *, beta: float, kl: float) -> Tensor:
    """Loss of each reply, 1 - sigmoid(beta (r - z)) where it is desirable, else 1 - sigmoid(beta (z - r)).

    kto: z = max(0, `kl`), the divergence from the reference (Ethayarajh et al. 2024, "KTO", arXiv:2402.01306, eq. 7).
    apo_zero_unpaired: z = 0 (D'Oosterlinck et al. 2024, "APO", arXiv:2408.06266, eq. 7 reply by reply).

    Args:
        name: a name of `UNPAIRED_LOSSES`.
        log_ratios_S: r.
        desirable_S: bool.
        beta: scale of the log-ratios.
        kl: `reference_point` of the optimizer step.

    Raises:
        ValueError: unknown `name`.
    """
    match name:
        case "kto":
            shifted_S = log_ratios_S - max(0.0, kl)
        case "apo_zero_unpaired":
            shifted_S = log_ratios_S
        case _:
            raise ValueError(f"Unknown loss {name!r}: use {' or '.join(UNPAIRED_LOSSES)}.")
    return torch.sigmoid(beta * torch.where(desirable_S, -shifted_S, shifted_S))


def reference_point(mismatched_log_ratios_S: Tensor) -> float:
    """The estimate of the divergence from the reference that KTO compares with (arXiv:2402.01306, section 4): the
    mean of r over prompts that are each followed by another prompt's reply, at least 0, without gradient.

    Raises:
        ValueError: fewer than two replies, none of which can then follow another's prompt.
    """
    if len(mismatched_log_ratios_S) < 2:
        raise ValueError("KTO needs at least two replies an optimizer step: each is put behind another's prompt.")
    return max(0.0, float(mismatched_log_ratios_S.detach().double().mean()))


@frozen(kw_only=True)
class UnpairedObjective:
    """Weighted sum of the replies' losses; a `PolicyObjective`. A reply is a sequence; `scores_S` is above 0 where it
    is desirable; `loss_weights_N` stands at each trained token and is the weight of its reply in the step.

    Attributes:
        loss: a name of `UNPAIRED_LOSSES`.
        beta: scale of the log-ratios.
        desirable_weight: factor of the loss of desirable replies.
        undesirable_weight: factor of the loss of the others.
        kl: `reference_point` of the whole optimizer step.
    """

    loss: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0

    def __call__(self, scores: TokenScores, batch: ExampleBatch) -> LossOutput:
        """Returns the micro-batch's share. Metrics are `kl`, the step's reference point, and means over replies,
        weighted as in the step: `accuracy` (the share on the right side of the reference point); `desirable_share` and
        `undesirable_share`; beta r of either kind, `desirable_reward` and `undesirable_reward`; and their log-probs,
        `desirable_logprob` and `undesirable_logprob`. `entropy` is a mean over tokens, each with the weight of its
        reply.

        Raises:
            ValueError: the batch lacks weights or reference log-probs.
        """
        mask_N, sequence_N, count = batch.action_mask_N, batch.sequence_ids_N, len(batch)
        ref_N = batch.filled("ref_logprobs_N").to(scores.logprobs_N)
        ratio_N = torch.where(mask_N, scores.logprobs_N - ref_N, 0.0)
        logprob_N = torch.where(mask_N, scores.logprobs_N, 0.0).detach()
        ratios_S, logprobs_S = (
            ratio_N.new_zeros(count).index_add(0, sequence_N, column_N) for column_N in (ratio_N, logprob_N)
        )
        weights_N = torch.where(mask_N, batch.filled("loss_weights_N"), 0.0)
        weights_S = weights_N.new_zeros(count).scatter_reduce(0, sequence_N, weights_N, "amax")
        desirable_S = batch.scores_S > 0
        factor_S = torch.where(desirable_S, self.desirable_weight, self.undesirable_weight)
        loss_S = unpaired_loss(self.loss, ratios_S, desirable_S, beta=self.beta, kl=self.kl)
        of_replies = {"reward": self.beta * ratios_S.detach(), "logprob": logprobs_S}
        right_S = (loss_S.detach() < 0.5).to(weights_S.dtype)
        kinds = {"desirable": weights_S * desirable_S, "undesirable": weights_S * ~desirable_S}
        metrics: dict[str, Tensor | float] = {
            "accuracy": (weights_S * right_S).sum(),
            "kl": Common(self.kl),
            "entropy": Mean(weighted_sum(scores.entropy_N.detach(), weights_N, mask_N), weights_N.sum()),
        }
        for kind, its_S in kinds.items():
            metrics[f"{kind}_share"] = its_S.sum()
            for name, column_S in of_replies.items():
                metrics[f"{kind}_{name}"] = Mean((its_S * column_S).sum(), its_S.sum())
        return LossOutput(loss=(weights_S * factor_S * loss_S).sum(), metrics=metrics)
