"""The critic's loss per token."""

import torch
from torch import Tensor


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2; without `clip` the first term alone (PPO's value clipping,
    as in OpenAI Baselines)."""
    plain_N = (values_N - returns_N).square()
    if clip is None:
        return plain_N / 2
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return torch.maximum(plain_N, (clipped_N - returns_N).square()) / 2
