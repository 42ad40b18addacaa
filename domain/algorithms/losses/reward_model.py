"""The loss of reward models that learn from pairs, and the objective that sums it."""

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.batches.metrics import CalibrationError, Mean, Spread
from rollgrad.domain.ports.models import LossOutput


def pairwise_reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, *, margins_P: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """-log sigmoid(r_c - r_r - m) + centring (r_c + r_r)^2, of each pair.

    The first term is the likelihood of Bradley and Terry's model (Ouyang et al. 2022, "InstructGPT", eq. 1), which
    OpenRLHF also calls logexp, log(1 + exp(r_r - r_c)); its margin m is Llama 2's (Touvron et al. 2023, eq. 2). The
    second holds the rewards around 0 (Eisenstein et al. 2023, "Helping or Herding?", arXiv:2312.09244).

    Args:
        chosen_P: rewards of the chosen replies.
        rejected_P: rewards of the rejected replies.
        margins_P: margins by which the chosen reply should be better.
        centring: weight of the second term.
    """
    return -logsigmoid(chosen_P - rejected_P - margins_P) + centring * (chosen_P + rejected_P).square()


@frozen(kw_only=True)
class RewardObjective:
    """Weighted sum of the pairs' losses, from the reward at each reply's last trained token; a `ValueObjective` over
    micro-batches that hold whole pairs.

    A pair is the two sequences of one unit: `sample_ids_S` is 0 for the chosen reply and 1 for the rejected one, and
    `scores_S` is the margin in both. `loss_weights_N` has at each trained token the weight of its pair in the step."""

    centring: float = 0.0

    def __call__(self, values_N: Tensor, batch: ExampleBatch) -> LossOutput:
        """Returns the micro-batch's share; metrics are means over pairs: `accuracy` (the chosen reply has the higher
        reward), `reward_gap`, `chosen_reward`, `rejected_reward`, and `calibration_error` of the probability
        sigmoid(r_c - r_r); and over replies, whatever their pairs weigh, `score_mean` and the standard deviation
        `score_std`.

        Raises:
            ValueError: the batch lacks weights.
        """
        order_S = torch.argsort(2 * batch.units_S + batch.sample_ids_S)
        last_S = last_trained(batch)[order_S]
        rewards_P2 = values_N[last_S].view(-1, 2)
        weights_P = batch.filled("loss_weights_N")[last_S].view(-1, 2)[:, 0]
        margins_P = batch.scores_S[order_S].view(-1, 2)[:, 0]
        chosen_P, rejected_P = rewards_P2.unbind(1)
        loss_P = pairwise_reward_loss(chosen_P, rejected_P, margins_P=margins_P, centring=self.centring)
        columns = {
            "accuracy": (chosen_P > rejected_P).to(weights_P.dtype),
            "reward_gap": chosen_P - rejected_P,
            "chosen_reward": chosen_P,
            "rejected_reward": rejected_P,
        }
        metrics: dict[str, Tensor | float] = {
            name: (weights_P * column_P.detach()).sum() for name, column_P in columns.items()
        }
        counted = rewards_P2.detach()[weights_P > 0].flatten()  # a process without pairs has a copy that weighs nothing
        metrics["calibration_error"] = CalibrationError.of_choices(chosen_P - rejected_P, weights_P)
        metrics |= {"score_mean": Mean(counted.double().sum(), len(counted)), "score_std": Spread.of(counted)}
        return LossOutput(loss=(weights_P * loss_P).sum(), metrics=metrics)


def last_trained(batch: ExampleBatch) -> Tensor:
    """Returns the index of each sequence's last trained token, [S]."""
    places_N = torch.where(batch.action_mask_N, torch.arange(batch.token_count), -1)
    return torch.full((len(batch),), -1).scatter_reduce(0, batch.sequence_ids_N, places_N, "amax")
