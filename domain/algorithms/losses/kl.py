"""Per-token estimates of the KL divergence from the log-probs of the sampled tokens."""

from torch import Tensor

from rollgrad.domain.algorithms.losses.ratios import bounded

MAX_KL = 10.0
"""Bound on a token's k1, k2 and k3, in nats, as in OpenRLHF (all three), verl and slime (k3). Without it one token to
which the reference gives e^12 times the probability would outweigh 10,000 others."""


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: str, ratio_N: Tensor | None = None) -> Tensor:
    """Returns estimates of KL(policy || reference) at each sampled token, with x = logprobs - ref_logprobs.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x (Schulman 2020, "Approximating KL Divergence"), each clamped to
    +-`MAX_KL`, beyond which there is no gradient. k3_unbiased = `ratio_N` * k3 with the importance ratio of the policy
    over the one that sampled, differentiated through the ratio: the value and the gradient are unbiased (DeepSeek-V3.2
    2025, section 3.1, eq. 7). It is not clamped: where k3 is large the ratio is small.

    Raises:
        ValueError: unknown `kind`, or k3_unbiased without `ratio_N`.
    """
    x_N = logprobs_N - ref_logprobs_N
    match kind:
        case "k1":
            return x_N.clamp(-MAX_KL, MAX_KL)
        case "k2":
            return (x_N.square() / 2).clamp(max=MAX_KL)
        case "k3" | "k3_unbiased":
            bounded_N = bounded(x_N)
            k3_N = (-bounded_N).expm1() + bounded_N
            if kind == "k3":
                return k3_N.clamp(max=MAX_KL)
            if ratio_N is None:
                raise ValueError("k3_unbiased needs the importance ratio of each token.")
            return ratio_N * k3_N
    raise ValueError(f"Unknown KL estimator {kind!r}: use k1, k2, k3 or k3_unbiased.")
