"""The table of policy losses, the decorator that adds to it, and the contract of a policy loss."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.catalogue import PolicyLossTraits
from rollgrad.domain.algorithms.settings import PolicyLossSettings


@frozen(kw_only=True, eq=False)
class PolicyLossInput:
    """One micro-batch of whole sequences; values per token are [N], with 0 at masked positions."""

    logprobs_N: Tensor
    """Log-probs of the policy, with gradient."""
    old_logprobs_N: Tensor
    """Log-probs of the proximal policy."""
    advantages_N: Tensor
    action_mask_N: Tensor
    """Bool."""
    sequence_N: Tensor
    """Int64: sequence of each token, from 0 to S - 1."""
    sequences: int
    """Number of sequences, S."""
    selected_N: Tensor | None = None
    """Bool: tokens chosen from the whole optimizer step; None where the loss chooses none."""
    rollout_logprobs_N: Tensor | None = None
    """Log-probs of the policy that sampled; None where nobody knows them."""


PolicyLossParams = PolicyLossSettings
"""The section `actor` as far as policy losses read it: `clip_low` and `clip_high`, `dual_clip`, `sapo_tau`, ..."""


@frozen(kw_only=True, eq=False)
class PolicyLoss:
    """Result of a policy loss."""

    loss_N: Tensor
    ratio_N: Tensor
    """Importance ratio."""
    clipped_low_N: Tensor
    """Tokens whose gradient is 0 because their ratio lies below the clip range."""
    clipped_high_N: Tensor
    """Tokens whose gradient is 0 because their ratio lies above the clip range."""
    metrics_N: Mapping[str, Tensor] = field(factory=dict)
    """Values of tokens by names of the loss's own. Their means, weighted as the loss is, are the metrics
    `policy/NAME`."""


PolicyLossFunction = Callable[..., PolicyLoss]
"""Takes inputs and parameters; a loss that was registered with settings of its own takes these third."""

TokenSelection = Callable[..., Tensor]
"""Takes a whole optimizer step's batch and what a loss takes besides its inputs; returns a bool for each token."""

POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""Functions by name; `catalogue.POLICY_LOSSES` has their traits."""

TOKEN_SELECTIONS: dict[str, TokenSelection] = {}
"""Functions that choose tokens for a loss, by its name, for losses that need `selected_N`."""


def policy_loss(
    name: str,
    traits: PolicyLossTraits | None = None,
    *,
    settings: type[Any] | None = None,
    select: TokenSelection | None = None,
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Registers a function as the policy loss `name`, replacing one of that name.

    `traits`: what it reads; None keeps those that the catalogue has for the name, or the defaults. `settings`: class of
    settings of its own, made by `rollgrad.setting`; the function takes them third, and users set them as
    `algo.losses.NAME.SETTING`. `select`: chooses `selected_N` from the whole optimizer step, before it is split.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        known = traits or catalogue.POLICY_LOSSES.get(name, PolicyLossTraits())
        catalogue.POLICY_LOSSES[name] = catalogue.with_settings(known, name, settings)
        POLICY_LOSSES[name] = function
        TOKEN_SELECTIONS.pop(name, None)
        if select is not None:
            TOKEN_SELECTIONS[name] = select
        return function

    return register
