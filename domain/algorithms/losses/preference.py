"""Losses of preference pairs, and the objective that sums them.

With s the log-prob of a reply and s_ref its log-prob under the reference, r = s - s_ref, and h = r_chosen - r_rejected;
a bar (s_bar, r_bar, h_bar) is the mean over the reply's trained tokens. With another divergence f from the reference
than the reverse KL, h = f'(e^r_chosen) - f'(e^r_rejected) (Wang et al. 2023, "f-DPO", arXiv:2309.16240).

Each docstring gives the loss of one pair. A function is registered under its name, which
`domain.algorithms.catalogue.PAIR_LOSSES` describes.
"""

from collections.abc import Callable

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollgrad.domain.algorithms.catalogue import IMITATION, PAIR_LOSSES, PairLossTraits
from rollgrad.domain.algorithms.losses.aggregation import weighted_sum
from rollgrad.domain.algorithms.losses.pairs import PAIRED, UNPAIRED, Pairs, by_reply, gap, pairs_of
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.batches.metrics import Mean
from rollgrad.domain.ports.models import LossOutput, TokenScores

CERTAIN = -1e-6
"""Mean log-probs are held below this where log(1 - p) is needed: nearer to 0 its gradient is not finite in float32."""


@frozen(kw_only=True)
class PairLossParams:
    """Numbers of the losses of pairs."""

    beta: float
    """Scale of the log-ratios; in `orpo` the weight of the odds ratio."""
    label_smoothing: float
    """Share of pairs that are taken for mislabelled."""
    simpo_gamma: float
    """Margin that `simpo` asks for."""
    discopop_tau: float
    """Temperature in `discopop`."""


PairLossFunction = Callable[[Pairs, PairLossParams], Tensor]
"""(pairs, parameters) -> loss_P."""

FUNCTIONS: dict[str, PairLossFunction] = {}
"""Name to function."""


def pair_loss(name: str, traits: PairLossTraits | None = None) -> Callable[[PairLossFunction], PairLossFunction]:
    """Registers a function as the pair loss `name`; `traits`: what it asks for, if the catalogue does not know it."""

    def register(function: PairLossFunction) -> PairLossFunction:
        FUNCTIONS[name] = function
        if traits is not None or name not in PAIR_LOSSES:
            PAIR_LOSSES[name] = traits or PairLossTraits()
        return function

    return register


@pair_loss("sigmoid")
def sigmoid(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta h) (Rafailov et al. 2023, "DPO", eq. 7). With `label_smoothing` e:
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (Mitchell 2023, "A note on DPO with noisy preferences", cDPO).
    """
    return _smoothed(params.beta * pairs.log_ratio_gap_P, params.label_smoothing)


@pair_loss("robust")
def robust(pairs: Pairs, params: PairLossParams) -> Tensor:
    """(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2e) with e = `label_smoothing` below 1/2, unbiased
    if a share e of the labels is flipped (Ray Chowdhury et al. 2024, "Provably Robust DPO", arXiv:2403.00409)."""
    x_P, e = params.beta * pairs.log_ratio_gap_P, params.label_smoothing
    return (-(1 - e) * logsigmoid(x_P) + e * logsigmoid(-x_P)) / (1 - 2 * e)


@pair_loss("ipo")
def ipo(pairs: Pairs, params: PairLossParams) -> Tensor:
    """(h_bar - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17, with log-probs averaged over tokens, as TRL has it from the
    authors)."""
    return (pairs.mean_log_ratio_gap_P - 1 / (2 * params.beta)).square()


@pair_loss("ipo_sum")
def ipo_sum(pairs: Pairs, params: PairLossParams) -> Tensor:
    """(h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17, with log-probs summed, as in OpenRLHF)."""
    return (pairs.log_ratio_gap_P - 1 / (2 * params.beta)).square()


@pair_loss("hinge")
def hinge(pairs: Pairs, params: PairLossParams) -> Tensor:
    """max(0, 1 - beta h) (Zhao et al. 2023, "SLiC-HF", arXiv:2305.10425, on log-ratios)."""
    return (1 - params.beta * pairs.log_ratio_gap_P).relu()


@pair_loss("sigmoid_norm")
def sigmoid_norm(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta h_bar), DPO normalised by length (Lambert et al. 2024, "Tulu 3", arXiv:2411.15124; there beta
    is 5); `label_smoothing` as in `sigmoid`."""
    return _smoothed(params.beta * pairs.mean_log_ratio_gap_P, params.label_smoothing)


@pair_loss("simpo")
def simpo(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta (s_bar_chosen - s_bar_rejected) - gamma), without a reference (Meng et al. 2024, "SimPO",
    arXiv:2405.14734; there beta is 2 to 2.5); `label_smoothing` as in `sigmoid`."""
    return _smoothed(params.beta * gap(pairs.mean_logprobs_P2) - params.simpo_gamma, params.label_smoothing)


@pair_loss("cpo")
def cpo(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta (s_chosen - s_rejected)), without a reference (Xu et al. 2024, "Contrastive Preference
    Optimization", arXiv:2401.08417, eq. 3, to which the paper adds the likelihood of the chosen replies, the loss
    `sft`); `label_smoothing` as in `sigmoid`."""
    return _smoothed(params.beta * gap(pairs.logprobs_P2), params.label_smoothing)


@pair_loss("orpo")
def orpo(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-s_bar_chosen - beta log sigmoid(log odds_chosen - log odds_rejected), with log odds = s_bar - log(1 - e^s_bar),
    without a reference (Hong et al. 2024, "ORPO", arXiv:2403.07691)."""
    mean_P2 = pairs.mean_logprobs_P2
    held_P2 = mean_P2.clamp(max=CERTAIN)
    odds_P2 = held_P2 - (-torch.expm1(held_P2)).log()
    return -mean_P2[:, 0] - params.beta * logsigmoid(gap(odds_P2))


@pair_loss("apo_zero")
def apo_zero(pairs: Pairs, params: PairLossParams) -> Tensor:
    """1 - sigmoid(beta r_chosen) + sigmoid(beta r_rejected): raises the chosen and lowers the rejected, for chosen
    replies better than the model's (D'Oosterlinck et al. 2024, "APO", eq. 7)."""
    chosen_P, rejected_P = (params.beta * pairs.log_ratios_P2).unbind(1)
    return (-chosen_P).sigmoid() + rejected_P.sigmoid()


@pair_loss("apo_down")
def apo_down(pairs: Pairs, params: PairLossParams) -> Tensor:
    """sigmoid(beta r_chosen) + 1 - sigmoid(beta h): lowers both, the rejected more, for chosen replies worse than the
    model's (D'Oosterlinck et al. 2024, "APO", eq. 8)."""
    return (params.beta * pairs.log_ratios_P2[:, 0]).sigmoid() + (-params.beta * pairs.log_ratio_gap_P).sigmoid()


@pair_loss("nca_pair")
def nca_pair(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(x_c) - (log sigmoid(-x_c) + log sigmoid(-x_r)) / 2, x = beta r (Chen et al. 2024, "Noise Contrastive
    Alignment", arXiv:2402.05369, for two replies with hard labels)."""
    chosen_P, rejected_P = (params.beta * pairs.log_ratios_P2).unbind(1)
    return -logsigmoid(chosen_P) - (logsigmoid(-chosen_P) + logsigmoid(-rejected_P)) / 2


@pair_loss("bco_pair")
def bco_pair(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(x_c) - log sigmoid(-x_r), x = beta r (Jung et al. 2024, "Binary Classifier Optimization",
    arXiv:2404.04656, with a reward shift of 0)."""
    chosen_P, rejected_P = (params.beta * pairs.log_ratios_P2).unbind(1)
    return -logsigmoid(chosen_P) - logsigmoid(-rejected_P)


@pair_loss("exo_pair")
def exo_pair(pairs: Pairs, params: PairLossParams) -> Tensor:
    """KL(q || p) of q = sigmoid(beta h) and p = 1 - e, e = `label_smoothing` above 0, as distributions over the two
    replies (Ji et al. 2024, "Efficient Exact Optimization", eq. 16)."""
    x_P, e = params.beta * pairs.log_ratio_gap_P, torch.tensor(params.label_smoothing, dtype=torch.float64)
    chosen_P = x_P.sigmoid() * (logsigmoid(x_P) - float(torch.log1p(-e)))
    return chosen_P + (-x_P).sigmoid() * (logsigmoid(-x_P) - float(e.log()))


@pair_loss("sppo_hard")
def sppo_hard(pairs: Pairs, params: PairLossParams) -> Tensor:
    """(r_chosen - 1 / (2 beta))^2 + (r_rejected + 1 / (2 beta))^2 (Wu et al. 2024, "SPPO", eq. 4.7 with win
    probabilities of 1 and 0)."""
    chosen_P, rejected_P = pairs.log_ratios_P2.unbind(1)
    return (chosen_P - 0.5 / params.beta).square() + (rejected_P + 0.5 / params.beta).square()


@pair_loss("discopop")
def discopop(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-(1 - m) log sigmoid(x) + m e^-x with x = beta h and m = sigmoid(x / tau) (Lu et al. 2024, "DiscoPOP", eq. 5)."""
    x_P = params.beta * pairs.log_ratio_gap_P
    mixing_P = (x_P / params.discopop_tau).sigmoid()
    return -(1 - mixing_P) * logsigmoid(x_P) + mixing_P * (-x_P).exp()


@pair_loss("aot")
def aot(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta (u - v)), where u = s_chosen - s_rejected is the pair's own and v the value of the same rank
    among the s_ref_chosen - s_ref_rejected of the step's pairs (Melnyk et al. 2024, "Distributional Preference
    Alignment of LLMs via Optimal Transport", arXiv:2406.05882, paired); `label_smoothing` as in `sigmoid`."""
    x_P = gap(pairs.logprobs_P2) - pairs.opposite(PAIRED)[:, 0]
    return _smoothed(params.beta * x_P, params.label_smoothing)


@pair_loss("aot_unpaired")
def aot_unpaired(pairs: Pairs, params: PairLossParams) -> Tensor:
    """-log sigmoid(beta (r_chosen - r_rejected)) of replies of the same rank, one among the step's chosen replies, the
    other among its rejected ones (Melnyk et al. 2024, arXiv:2406.05882, unpaired); `label_smoothing` as in `sigmoid`.

    A reply's opposite is a constant here, and each of the two has its half of what both lose, with the whole
    gradient at its own log-prob."""
    chosen_P, rejected_P = pairs.log_ratios_P2.unbind(1)
    of_chosen_P, of_rejected_P = pairs.opposite(UNPAIRED).unbind(1)
    both_P = _smoothed(params.beta * (chosen_P - of_chosen_P), params.label_smoothing) + _smoothed(
        params.beta * (of_rejected_P - rejected_P), params.label_smoothing
    )
    return both_P - both_P.detach() / 2


@frozen(kw_only=True)
class PreferenceObjective:
    """Weighted sum of the pairs' losses; a `PolicyObjective` over micro-batches that hold whole pairs.

    A pair is the sequences of one unit: `sample_ids_S` is 0 in the chosen reply's, 1 in the rejected one's.
    `loss_weights_N` stands at each trained token and is the weight of its pair in the step, `positive_weights_N` that
    of each chosen token in the mean over the step's chosen tokens.

    `settings` are those of the losses and their mixture (MPO, Wang et al. 2024, arXiv:2411.10442). Its `ld_alpha`
    weighs the tokens beyond the length of a pair's shorter reply (Liu et al. 2024, "LD-DPO", arXiv:2409.06411). With
    its `wpo` a pair's losses count w_chosen w_rejected times, a constant, where w = e^(mean of log pi - log sum_v
    pi_v^2 over the reply's tokens) (Zhou et al. 2024, "WPO", arXiv:2406.11827, sampled alignment).
    """

    settings: PreferenceSettings = field(factory=PreferenceSettings)

    def beta(self, name: str) -> float:
        """Returns the scale of the loss `name`: the one that is set, or its own."""
        return PAIR_LOSSES[name].beta if self.settings.beta is None else self.settings.beta

    def params(self, name: str) -> PairLossParams:
        """Returns what the loss `name` is computed with."""
        settings = self.settings
        return PairLossParams(
            beta=self.beta(name),
            label_smoothing=settings.label_smoothing,
            simpo_gamma=settings.simpo_gamma,
            discopop_tau=settings.discopop_tau,
        )

    def __call__(self, scores: TokenScores, batch: ExampleBatch) -> LossOutput:
        """Returns the micro-batch's share; metrics are means over pairs: `chosen_reward` and `rejected_reward` (beta r,
        without a reference beta s_bar, in `cpo` beta s), their `reward_margin`, `accuracy` (the share of margins above
        0), `chosen_logprob`, `rejected_logprob`, `chosen_fell_share` (chosen replies less likely than under the
        reference) and with `wpo` `wpo_weight`. Means over tokens are `entropy`, of both replies, and
        `chosen_token_accuracy`, the share of chosen tokens that are the most likely ones, where the scores have it.

        Raises:
            ValueError: the batch lacks weights, or a loss needs something that it or the scores lack.
        """
        mask_N = batch.action_mask_N
        logprobs_N = torch.where(mask_N, scores.logprobs_N, 0.0)
        pairs, weights_P = pairs_of(logprobs_N, batch, self.settings)
        factor_P = self._policy_weights(logprobs_N, scores, batch, pairs) if self.settings.wpo else None
        scale_P = weights_P if factor_P is None else weights_P * factor_P
        loss = logprobs_N.new_zeros(())
        metrics: dict[str, Tensor | float] = {}
        for name, weight in self.settings.mixture.items():
            if name == IMITATION:
                term = -weighted_sum(logprobs_N, batch.filled("positive_weights_N"), mask_N)
            else:
                term = (scale_P * FUNCTIONS[name](pairs, self.params(name))).sum()
            metrics["chosen_nll" if name == IMITATION else f"{name}_loss"] = term.detach()
            loss = loss + weight * term
        columns = self._columns(pairs) | ({} if factor_P is None else {"wpo_weight": factor_P})
        metrics |= {name: (weights_P * column_P).sum() for name, column_P in columns.items()}
        weights_N = torch.where(mask_N, batch.filled("loss_weights_N"), 0.0)
        metrics["entropy"] = Mean(weighted_sum(scores.entropy_N.detach(), weights_N, mask_N), weights_N.sum())
        if scores.correct_N is not None:
            chosen_weights_N = batch.filled("positive_weights_N")
            metrics["chosen_token_accuracy"] = weighted_sum(scores.correct_N, chosen_weights_N, mask_N)
        return LossOutput(loss=loss, metrics=metrics)

    def _policy_weights(self, logprobs_N: Tensor, scores: TokenScores, batch: ExampleBatch, pairs: Pairs) -> Tensor:
        """Returns by how much each pair's losses count, without a gradient."""
        if scores.collision_N is None:
            raise ValueError("WPO reads collision_N, which the scores do not have.")
        aligned_N = torch.where(batch.action_mask_N, logprobs_N.detach() + scores.collision_N, 0.0)
        return (by_reply(aligned_N, batch) / pairs.lengths_P2).sum(1).exp()

    def _columns(self, pairs: Pairs) -> dict[str, Tensor]:
        """Returns the metrics of the pairs."""
        first = next((name for name in self.settings.loss if name != IMITATION), "sigmoid")
        scale = self.beta(first)
        with_reference = pairs.ref_logprobs_P2 is not None
        own_P2 = pairs.logprobs_P2 if PAIR_LOSSES[first].sums else pairs.mean_logprobs_P2
        chosen_P, rejected_P = (pairs.log_ratios_P2 if with_reference else own_P2).detach().unbind(1)
        chosen_logprob_P, rejected_logprob_P = pairs.logprobs_P2.detach().unbind(1)
        columns = {
            "chosen_reward": scale * chosen_P,
            "rejected_reward": scale * rejected_P,
            "reward_margin": scale * (chosen_P - rejected_P),
            "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
            "chosen_logprob": chosen_logprob_P,
            "rejected_logprob": rejected_logprob_P,
        }
        return columns | ({"chosen_fell_share": (chosen_P < 0).to(chosen_P.dtype)} if with_reference else {})


def _smoothed(x_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(x_P) - label_smoothing * logsigmoid(-x_P)
