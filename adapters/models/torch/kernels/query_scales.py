"""Scales of queries by their positions, which the code of Llama 4 counts from the beginning of a pass (temperature
tuning of layers without rotary embeddings, Nakanishi 2025, arXiv:2501.19399).

In a pass over packed or cached tokens the count is not the position. The layers of such a model hand the positions on
to attention, which corrects the scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def install_query_scales(model: Any) -> None:
    """Has the layers of a transformers model that scale queries so hand positions on where a pass has a plan."""
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        scales = getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True)
        if scales and _positions_handed_on not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_positions_handed_on, with_kwargs=True)


def _positions_handed_on(
    layer: nn.Module, positional: Any, named: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if named.get("attention_plan") is None:
        return None
    return positional, {**named, "query_positions": named["position_ids"]}


def scaled_by_position(attention: Any, query_BHTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Returns queries that a layer's code has scaled as those of the tokens 0, 1, ... of a sequence, scaled as those of
    their positions."""
    counted_T = torch.arange(query_BHTD.shape[2], device=query_BHTD.device)
    factor_BT = _scales(attention, positions_BT) / _scales(attention, counted_T)
    return (query_BHTD * factor_BT[:, None, :, None]).to(query_BHTD.dtype)


def _scales(attention: Any, positions: Tensor) -> Tensor:
    """Returns transformers' scales, float32."""
    floors = torch.floor((positions.float() + 1.0) / float(attention.floor_scale))
    return torch.log1p(floors) * float(attention.attn_scale) + 1.0
