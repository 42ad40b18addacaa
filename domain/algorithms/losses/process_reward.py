"""The loss of process reward models: at the end of each step the model says by its next token whether the step is
right."""

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import log_softmax

from rollgrad.domain.batches.examples import StepBatch
from rollgrad.domain.batches.metrics import Mean
from rollgrad.domain.ports.models import LossOutput, TokenScores


def step_loss(logits_KR: Tensor, labels_K: Tensor) -> Tensor:
    """Cross-entropy of each step over the reward tokens alone.

    Float labels are the probability p that the step is right, and the target is (p, 1 - p) over two reward tokens, of
    which the first stands for right (Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935: its hard and
    soft estimates). Integer labels are the index of the right reward token (Lightman et al. 2023, arXiv:2305.20050).

    Args:
        logits_KR: of each of the K steps, the logits (or log-probs) of the R reward tokens.
        labels_K: as above.

    Raises:
        ValueError: float labels, but not two reward tokens.
    """
    logprobs_KR = log_softmax(logits_KR, dim=1)
    if not labels_K.is_floating_point():
        return -logprobs_KR.gather(1, labels_K[:, None])[:, 0]
    if logits_KR.shape[1] != 2:
        raise ValueError(f"Labels from 0 to 1 need two reward tokens, but there are {logits_KR.shape[1]}.")
    right_K, wrong_K = logprobs_KR.unbind(1)
    return -labels_K * right_K - (1 - labels_K) * wrong_K


def step_accuracy(logits_KR: Tensor, labels_K: Tensor) -> Tensor:
    """Whether each step's likeliest reward token is the label's, as 0 or 1; a float label stands for the first where it
    is above 1/2."""
    wanted_K = (labels_K <= 0.5).long() if labels_K.is_floating_point() else labels_K
    return (logits_KR.argmax(1) == wanted_K).to(logits_KR.dtype)


@frozen(kw_only=True)
class StepObjective:
    """Weighted sum of the steps' losses, from the odds of the two reward tokens at the last token of each step; a
    `PolicyObjective` over micro-batches that hold whole solutions."""

    def __call__(self, scores: TokenScores, batch: StepBatch) -> LossOutput:
        """Returns the micro-batch's share. Metrics: `step_accuracy` is a mean over steps with the weights of the loss;
        `error_f1` is the F1 score of finding steps that are wrong, and `first_error_accuracy` the share of solutions of
        which the first wrong step is found, or that there is none, both whatever solutions weigh.

        Raises:
            ValueError: the batch lacks weights, or the model compares no tokens.
        """
        if scores.odds_N is None:
            raise ValueError("The scores have no odds_N: make the model with the two reward tokens as outcomes.")
        mask_N = batch.action_mask_N
        weights_N = batch.filled("loss_weights_N")
        odds_K, labels_K, weights_K = scores.odds_N[mask_N], batch.labels_N[mask_N], weights_N[mask_N]
        logits_K2 = torch.stack([odds_K, torch.zeros_like(odds_K)], dim=1)
        loss = (weights_K * step_loss(logits_K2, labels_K)).sum()
        found_K, wrong_K = odds_K.detach() <= 0, labels_K <= 0.5
        counted_K = weights_K > 0  # a process without solutions has a copy that weighs nothing
        sequence_K = batch.sequence_ids_N[mask_N]
        same_S = _first(found_K, sequence_K, len(batch)) == _first(wrong_K, sequence_K, len(batch))
        counted_S = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, sequence_K[counted_K], True)
        hits = 2 * (found_K & wrong_K & counted_K).sum()
        return LossOutput(
            loss=loss,
            metrics={
                "step_accuracy": (weights_K * step_accuracy(logits_K2.detach(), labels_K)).sum(),
                "error_f1": Mean(hits, hits + ((found_K != wrong_K) & counted_K).sum()),
                "first_error_accuracy": Mean((same_S & counted_S).sum(), counted_S.sum()),
            },
        )


def _first(chosen_K: Tensor, sequence_K: Tensor, count: int) -> Tensor:
    """Returns the index of the first chosen step of each sequence, [S]; the number of all steps where none is."""
    places_K = torch.where(chosen_K, torch.arange(len(chosen_K)), len(chosen_K))
    return torch.full((count,), len(chosen_K)).scatter_reduce(0, sequence_K, places_K, "amin")
