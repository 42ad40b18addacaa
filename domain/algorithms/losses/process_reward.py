"""The loss of process reward models: at the end of each step the model says by its next token whether the step is
right."""

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rollgrad.domain.batches.examples import StepBatch
from rollgrad.domain.batches.metrics import Mean
from rollgrad.domain.ports.models import LossOutput, TokenScores


def step_loss(odds_K: Tensor, labels_K: Tensor) -> Tensor:
    """Cross-entropy of each of K steps over the two reward tokens alone: -p log sigmoid(x) - (1 - p) log sigmoid(-x)
    (Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935, eq. 2; p is its hard or soft estimate).

    Args:
        odds_K: x, the logit of the reward token for right less that of the other.
        labels_K: p, the probability that the step is right.
    """
    return binary_cross_entropy_with_logits(odds_K, labels_K.to(odds_K), reduction="none")


@frozen(kw_only=True)
class StepObjective:
    """Weighted sum of the steps' losses, from the odds of the two reward tokens at the last token of each step; a
    `PolicyObjective` over micro-batches that hold whole solutions."""

    def __call__(self, scores: TokenScores, batch: StepBatch) -> LossOutput:
        """Returns the micro-batch's share. Metrics: `step_accuracy` is a mean over steps with the weights of the loss;
        `error_f1` is the F1 score of finding steps that are wrong. `first_error_accuracy` is the share of solutions
        whose first wrong step is found, or of which it is found that they have none. Both ignore the weights of
        solutions.

        Raises:
            ValueError: the batch lacks weights, or the model compares no tokens.
        """
        if scores.odds_N is None:
            raise ValueError("The scores have no odds_N: make the model with the two reward tokens as outcomes.")
        mask_N = batch.action_mask_N
        weights_N = batch.filled("loss_weights_N")
        odds_K, labels_K, weights_K = scores.odds_N[mask_N], batch.labels_N[mask_N], weights_N[mask_N]
        loss = (weights_K * step_loss(odds_K, labels_K)).sum()
        found_K, wrong_K = odds_K.detach() <= 0, labels_K <= 0.5
        counted_K = weights_K > 0  # a process without solutions has a copy that weighs nothing
        sequence_K = batch.sequence_ids_N[mask_N]
        same_S = _first(found_K, sequence_K, len(batch)) == _first(wrong_K, sequence_K, len(batch))
        counted_S = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, sequence_K[counted_K], True)
        hits = 2 * (found_K & wrong_K & counted_K).sum()
        return LossOutput(
            loss=loss,
            metrics={
                "step_accuracy": (weights_K * (found_K == wrong_K)).sum(),
                "error_f1": Mean(hits, hits + ((found_K != wrong_K) & counted_K).sum()),
                "first_error_accuracy": Mean((same_S & counted_S).sum(), counted_S.sum()),
            },
        )


def _first(chosen_K: Tensor, sequence_K: Tensor, count: int) -> Tensor:
    """Returns the index of the first chosen step of each sequence, [S]; the number of all steps where none is."""
    places_K = torch.where(chosen_K, torch.arange(len(chosen_K)), len(chosen_K))
    return torch.full((count,), len(chosen_K)).scatter_reduce(0, sequence_K, places_K, "amin")
