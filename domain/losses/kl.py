"""Per-token estimates of the KL divergence from the log-probs of the sampled tokens."""

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by this before exp: e^20 is finite in float32 and far outside any useful range."""


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) at each token sampled from the policy, with x = logprobs - ref_logprobs.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x (Schulman 2020, "Approximating KL Divergence").

    Raises:
        ValueError: unknown `kind`.
    """
    x_N = logprobs_N - ref_logprobs_N
    match kind:
        case "k1":
            return x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            bounded_N = x_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (-bounded_N).expm1() + bounded_N
    raise ValueError(f"Unknown KL estimator {kind!r}: use k1, k2 or k3.")
