"""Score centering (Marek, Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning",
arXiv:2609.20807): takes out of a token's policy gradient what it would be on average over the tokens that the sampler
might have drawn in its place.

Where the policy pi itself samples, the mean of its score grad log pi is 0, so that a baseline changes no expected
gradient. Where another one, mu, does, it is not: with weights w_v the mean of the weighted score is
M = sum_v mu_v w_v grad log pi_v, and whatever is common to the advantages of many tokens pushes along it. A centred
gradient is A (w_t grad log pi_t - M).

mu is known at its most likely tokens H alone. Outside of these it is taken for rho pi, with rho = (1 - sum_H mu) /
(1 - sum_H pi), by which it has the same mass there (the paper's top-k estimator; eq. 14). With c_v = mu_v w_v for v in
H, and alpha = rho w outside of it, w being the weight of a ratio of 1 / rho, and because sum_v pi_v grad log pi_v = 0,

    M = sum_H (c_v - alpha pi_v) grad log pi_v,

which is the gradient of sum_H sg(c_v - alpha pi_v) log pi_v.
"""

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms.settings import CorrectionMode, CorrectionSettings

LEAST_TAIL = 1e-6
"""Mass that either policy has outside of the head at least, as rho counts it (the paper's appendix A.3): below that
float32 cannot tell it from 0. Where both have less, rho is 1, and equal policies leave nothing."""


@frozen(kw_only=True, eq=False)
class SamplerHead:
    """The most likely tokens of the policy that sampled, at A places: `ids_AK` int64, `logprobs_AK` float32, -inf where
    there is none."""

    ids_AK: Tensor
    logprobs_AK: Tensor


@frozen(kw_only=True, eq=False)
class CentredScores:
    """The mean of the weighted score, and two measures of it."""

    term_A: Tensor
    """Its gradient is the mean of the weighted score."""
    policy_mass_A: Tensor
    """The policy's mass at the sampler's most likely tokens; no gradient."""
    residual_A: Tensor
    """The sum of |c_v - alpha pi_v|, 0 where both policies are the same; no gradient."""


@frozen
class ScoreCentering:
    """Settings of the mean that is taken out. `correction` gives a token's weight by its ratio pi / mu, by which its
    loss is weighted, too: its `mode`, `low` and `high`, at the level of tokens; None weighs all alike."""

    correction: CorrectionSettings | None = None

    def __call__(self, logprobs_AK: Tensor, head: SamplerHead) -> CentredScores:
        """Returns the mean score at A places. `logprobs_AK` are the policy's at the tokens of `head`, over the whole
        vocabulary, with gradient; where `head` has none, any number."""
        with torch.no_grad():
            known_AK = head.logprobs_AK.isfinite() & logprobs_AK.isfinite()
            policy_AK = torch.where(known_AK, logprobs_AK.exp(), 0.0)
            sampler_AK = torch.where(known_AK, head.logprobs_AK.exp(), 0.0)
            policy_mass_A = policy_AK.sum(1)
            tails_2A = (1 - torch.stack([sampler_AK.sum(1), policy_mass_A])).clamp(min=LEAST_TAIL)
            rho_A = tails_2A[0] / tails_2A[1]
            alpha_A = self._weighted(rho_A, torch.ones_like(rho_A))
            residual_AK = self._weighted(sampler_AK, policy_AK) - alpha_A[:, None] * policy_AK
        # A log-prob of -inf times 0 would be NaN.
        term_A = (residual_AK * torch.where(known_AK, logprobs_AK, 0.0)).sum(1)
        return CentredScores(term_A=term_A, policy_mass_A=policy_mass_A, residual_A=residual_AK.abs().sum(1))

    def _weighted(self, sampler: Tensor, policy: Tensor) -> Tensor:
        """Returns mu w(pi / mu), which needs no ratio: of mu = 0 there is none."""
        if self.correction is None:
            return sampler
        low, high = self.correction.low * sampler, self.correction.high * sampler
        match self.correction.mode:
            case CorrectionMode.TRUNCATE:
                return torch.minimum(policy, high)
            case CorrectionMode.CLIP:
                return torch.maximum(torch.minimum(policy, high), low)
            case _:
                return torch.where((policy >= low) & (policy <= high), policy, 0.0)
