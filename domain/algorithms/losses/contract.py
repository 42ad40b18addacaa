"""The table of policy losses, the decorator that adds to it, and the contract of a policy loss."""

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import PolicyLossTraits


@frozen(kw_only=True, eq=False)
class PolicyLossInput:
    """One micro-batch of whole sequences; values per token are [N], with 0 at masked positions.

    `logprobs_N`: of the policy, with gradient. `old_logprobs_N`: of the proximal policy. `action_mask_N`: bool.
    `sequence_N`: int64, sequence of each token, from 0 to S - 1. `sequences`: S. `selected_N`: bool, tokens chosen from
    the whole optimizer step, or None."""

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    action_mask_N: Tensor
    sequence_N: Tensor
    sequences: int
    selected_N: Tensor | None = None


@frozen(kw_only=True)
class PolicyLossParams:
    """Parameters of the policy losses.

    `clip_low`, `clip_high`: clip range below and above, in the loss's own measure. `dual_clip`: bound of `ppo` for
    negative advantages. `sapo_tau`: temperatures for positive and negative advantages. `cov_kl_coef`: weight of the
    penalty of `kl_cov`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    cov_kl_coef: float = 1.0


@frozen(kw_only=True, eq=False)
class PolicyLoss:
    """Result of a policy loss: `loss_N`, the importance ratio `ratio_N`, and the tokens whose gradient is 0 because
    their ratio lies below (`clipped_low_N`) or above (`clipped_high_N`) the clip range."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


PolicyLossFunction = Callable[[PolicyLossInput, PolicyLossParams], PolicyLoss]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""Functions by name; `catalogue.POLICY_LOSSES` has their traits."""


def policy_loss(
    name: str, traits: PolicyLossTraits | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Registers a function as the policy loss `name`, replacing one of that name.

    `traits`: the settings that it reads; None keeps those that the catalogue has for the name, or the defaults.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[name] = function
        if traits is not None or name not in catalogue.POLICY_LOSSES:
            catalogue.POLICY_LOSSES[name] = traits or PolicyLossTraits()
        return function

    return register
