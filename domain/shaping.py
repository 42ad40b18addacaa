"""Reward shaping: what happens to rewards before any baseline sees them."""

import torch
from torch import Tensor


def clip_rewards(rewards_N: Tensor, limits: tuple[float, float]) -> Tensor:
    """Rewards clamped to `limits`."""
    return torch.clamp(rewards_N, *limits)
