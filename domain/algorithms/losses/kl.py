"""Per-token estimates of the KL divergence from the log-probs of the sampled tokens, and the decorator that adds to
them."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.columns import check_tokens
from rollgrad.domain.algorithms.losses.ratios import bounded
from rollgrad.domain.errors import ConfigurationError

MAX_KL = 10.0
"""Bound on a token's k1, k2, k3 and abs, in nats, as in OpenRLHF (the first three), verl and slime (k3). Without it one
token to which the reference gives e^12 times the probability would outweigh 10,000 others."""


KLFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes the policy's and the reference's log-probs of the sampled tokens and their importance ratios; returns an
estimate for each token."""

OWN: dict[str, KLFunction] = {}
"""Functions of users, by their names, which `catalogue.KL_ESTIMATORS` has, too."""


def kl_estimator(name: str) -> Callable[[KLFunction], KLFunction]:
    """Registers a function as the KL estimator `name`, replacing one of that name.

    The function takes `logprobs_N`, `ref_logprobs_N` and `ratio_N`, the importance ratio of the policy over the one
    before the update (1 where KL is in the reward). It returns one value for each token; those of sampled tokens are
    read. As a loss it is differentiated through `logprobs_N` and `ratio_N`.

    Raises:
        ConfigurationError: the name is one of rollgrad's own, by which metrics go, too.

    >>> @kl_estimator("squared")
    ... def squared(logprobs_N, ref_logprobs_N, ratio_N):
    ...     return (logprobs_N - ref_logprobs_N) ** 2
    >>> float(kl_estimate(torch.tensor([-1.0]), torch.tensor([-3.0]), "squared"))
    4.0
    >>> del OWN["squared"]; catalogue.KL_ESTIMATORS.remove("squared")
    """
    if name in catalogue.KL_ESTIMATORS and name not in OWN:
        raise ConfigurationError(
            f"{name!r} is a KL estimator of rollgrad's own, by which metrics go, too: choose another name for yours."
        )

    def register(function: KLFunction) -> KLFunction:
        OWN[name] = function
        if name not in catalogue.KL_ESTIMATORS:
            catalogue.KL_ESTIMATORS.append(name)
        return function

    return register


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: str, ratio_N: Tensor | None = None) -> Tensor:
    """Returns estimates of KL(policy || reference) at each sampled token, with x = logprobs - ref_logprobs.

    - k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x (Schulman 2020, "Approximating KL Divergence").
    - abs = |x| (verl). As a loss its gradient is that of twice the total variation.
    - k3_unbiased = `ratio_N` * k3, differentiated through the importance ratio of the policy over the one that sampled:
      the value and the gradient are unbiased (DeepSeek-V3.2 2025, section 3.1, eq. 7).
    - Any other kind is one that `kl_estimator` has registered, with ratios of 1 where none are given.

    k1, k2, k3 and abs are clamped to +-`MAX_KL`, beyond which they have no gradient. k3_unbiased is not clamped: where
    k3 is large the ratio is small.

    Raises:
        ValueError: unknown `kind`, or k3_unbiased without `ratio_N`.
        ConfigurationError: a user's own returned something without a value for each token.
    """
    if kind in OWN:
        own_N = OWN[kind](logprobs_N, ref_logprobs_N, torch.ones_like(logprobs_N) if ratio_N is None else ratio_N)
        check_tokens(f"The KL estimator {kind}", "estimates", own_N, logprobs_N)
        return own_N
    x_N = logprobs_N - ref_logprobs_N
    match kind:
        case "k1":
            return x_N.clamp(-MAX_KL, MAX_KL)
        case "k2":
            return (x_N.square() / 2).clamp(max=MAX_KL)
        case "abs":
            return x_N.abs().clamp(max=MAX_KL)
        case "k3" | "k3_unbiased":
            bounded_N = bounded(x_N)
            k3_N = (-bounded_N).expm1() + bounded_N
            if kind == "k3":
                return k3_N.clamp(max=MAX_KL)
            if ratio_N is None:
                raise ValueError("k3_unbiased needs the importance ratio of each token.")
            return ratio_N * k3_N
    raise ValueError(f"Unknown KL estimator {kind!r}: use k1, k2, k3, k3_unbiased or abs.")
