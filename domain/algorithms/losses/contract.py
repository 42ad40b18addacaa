"""The table of policy losses, the decorator that adds to it, and the contract of a policy loss."""

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import PolicyLossTraits


@frozen(kw_only=True, eq=False)
class PolicyLossInput:
    """One micro-batch, whole sequences, per token [N] with 0 at masked places: log-probs of the policy (with gradient)
    and of the proximal policy (`old_logprobs_N`), advantages, `action_mask_N` bool, `sequence_N` int64 (0..S-1 of each
    token), `sequences` S, and `selected_N` bool (tokens chosen from the whole step, or None)."""

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    action_mask_N: Tensor
    sequence_N: Tensor
    sequences: int
    selected_N: Tensor | None = None


@frozen(kw_only=True)
class PolicyLossParams:
    """`clip_low`, `clip_high`: clip range below and above, in the loss's own measure. `dual_clip`: see `ppo`.
    `sapo_tau`: temperatures for positive and negative advantages. `cov_kl_coef`: see `kl_cov`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    cov_kl_coef: float = 1.0


@frozen(kw_only=True, eq=False)
class PolicyLoss:
    """`loss_N`, the importance ratio `ratio_N`, and where the clip takes the gradient away on either side."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


PolicyLossFunction = Callable[[PolicyLossInput, PolicyLossParams], PolicyLoss]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""Name to function; `domain.catalogue.POLICY_LOSSES` holds what each asks for."""


def policy_loss(
    name: str, traits: PolicyLossTraits | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Registers a function as the policy loss `name`, replacing one of that name.

    `traits`: what it reads; None keeps those the catalogue has for the name, or the defaults.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[name] = function
        if traits is not None or name not in catalogue.POLICY_LOSSES:
            catalogue.POLICY_LOSSES[name] = traits or PolicyLossTraits()
        return function

    return register
