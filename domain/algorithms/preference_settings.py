"""Settings of the losses of preference pairs. Importable without torch."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.algorithms.settings import MOVING
from rollgrad.domain.settings import COUNT, POSITIVE, SHARE, SOME_SHARE, Range, own_first, setting


class FDivergence(StrEnum):
    """Divergence of the policy from the reference in losses of pairs."""

    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    JS = "js_divergence"
    ALPHA = "alpha_divergence"


@define(kw_only=True)
class FollowingSettings:
    """A reference that follows the policy."""

    ref_sync_steps: int | None = setting(
        None,
        "Optimizer steps after each of which the reference moves toward the policy (TR-DPO, Gorbatovski et al. 2024, "
        "arXiv:2404.09656; there 256 to 1024); its log-probs are then computed in each step. None: it never moves.",
        COUNT,
    )
    ref_mixup: float = setting(
        0.6,
        "Share of the policy in the weights of the reference that has moved; the rest is the reference before.",
        SOME_SHARE,
        only_if=MOVING,
    )


@define(kw_only=True, field_transformer=own_first)
class PreferenceSettings(FollowingSettings):
    """The loss of preference pairs."""

    loss: tuple[str, ...] = setting(
        ("sigmoid",),
        "Losses that are added up: sigmoid (DPO; with label_smoothing cDPO), robust, ipo, ipo_sum, hinge, "
        "sigmoid_norm, simpo, cpo, orpo, apo_zero, apo_down, nca_pair, bco_pair, exo_pair, sppo_hard, discopop, aot, "
        "aot_unpaired, or sft, the negative log-likelihood of the chosen replies.",
        Range(lambda names: bool(names) and len(set(names)) == len(names), "at least one name, and each once"),
    )
    loss_weights: tuple[float, ...] | None = setting(
        None,
        "Weight of each loss (MPO: sigmoid bco_pair sft with 0.8 0.2 1); default: 1 each.",
        Range(lambda weights: min(weights, default=0.0) >= 0, "numbers of at least 0"),
    )
    beta: float | None = setting(
        None,
        "Scale of the log-ratios against the reference, in orpo the weight of the odds ratio; default: the loss's own "
        "(0.1, simpo 2, sigmoid_norm 5).",
        POSITIVE,
    )
    label_smoothing: float = setting(
        0.0,
        "Share of pairs that are taken for mislabelled: cDPO with sigmoid, and what robust and exo_pair reckon with.",
        Range(lambda share: 0 <= share < 0.5, "at least 0 and below 0.5"),
    )
    simpo_gamma: float = setting(1.0, "Margin that simpo asks for between the two replies' beta x mean log-prob.")
    discopop_tau: float = setting(0.05, "Temperature of discopop's mixture.", POSITIVE)
    f_divergence: FDivergence = setting(
        FDivergence.REVERSE_KL,
        "Divergence from the reference that holds the policy near it: reverse_kl (DPO), forward_kl, js_divergence, or "
        "alpha_divergence, between the first two (Wang et al. 2023, f-DPO, arXiv:2309.16240).",
    )
    f_alpha: float = setting(
        0.5, "Of the alpha-divergence: near 0 it is the reverse KL, at 1 the forward KL.", SOME_SHARE
    )
    ld_alpha: float = setting(
        1.0,
        "What a token beyond the length of the pair's shorter reply counts in the sums of log-probs (LD-DPO); 1 is as "
        "much as the others.",
        SHARE,
    )
    wpo: bool = setting(
        False,
        "Weigh the losses of each pair by how likely the policy is to write both replies itself, token by token (WPO, "
        "Zhou et al. 2024, arXiv:2406.11827); sft, which is no loss of pairs, is not weighed.",
    )

    @property
    def mixture(self) -> dict[str, float]:
        """Weight of each loss, by name."""
        weights = self.loss_weights or (1.0,) * len(self.loss)
        return dict(zip(self.loss, weights, strict=True))
