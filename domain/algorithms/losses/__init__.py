"""Losses per token, and their sum. Importing anything from here registers the policy losses."""

from rollgrad.domain.algorithms.losses import policy
from rollgrad.domain.algorithms.losses.contract import POLICY_LOSSES, policy_loss

__all__ = ["POLICY_LOSSES", "policy", "policy_loss"]
