"""Token losses and how they become one number. Importing anything from here registers the policy losses."""

from rollgrad.domain.losses import policy
from rollgrad.domain.losses.registry import POLICY_LOSSES, policy_loss

__all__ = ["POLICY_LOSSES", "policy", "policy_loss"]
