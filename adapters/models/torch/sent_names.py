"""Names of a model's weights on their way to engines, which know those of the files of its type.

transformers renames some weights of some types when it reads files: Mixtral's `block_sparse_moe` is `mlp` in memory.
What it joins, as the experts of a layer, is sent joined: under its own name, or, where experts have the names w1, w2
and w3 in files, under those that vLLM has for these joined.
"""

from collections.abc import Callable
from typing import Any

from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.loading.lora import NamedWeight, plain_buffers, plain_weights

JOINED = {".experts.gate_up_proj": ".experts.w13", ".experts.down_proj": ".experts.w2"}
"""vLLM's names of joined experts by those of transformers, where files have w1, w2 and w3."""


def sent_name(model: Any) -> Callable[[str], str]:
    """Returns a function that turns the name of a weight of a transformers model into that under which it is sent."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

    found = getattr(model, "_weight_conversions", None)  # those with which it was read
    if found is None:
        every = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in every if not isinstance(each, PrefixChange)]
    renamings = [each.reverse_transform() for each in reversed(found) if isinstance(each, WeightRenaming)]
    joined = JOINED if any(".w1." in pattern for each in found for pattern in each.source_patterns) else {}

    def name(own: str) -> str:
        renamed = str(rename_source_key(own, renamings, [], reverse=True)[0]) if renamings else own
        for ours, theirs in joined.items():
            renamed = renamed.replace(ours, theirs)
        return renamed

    return name


def sent_weights(model: Any) -> list[NamedWeight]:
    """Returns every weight of a model without adapters, under the name under which it is sent."""
    name = sent_name(model)
    return [evolve(weight, name=name(weight.name)) for weight in plain_weights(model)]


def sent_buffers(model: Any) -> dict[str, Tensor]:
    """Returns the numbers in a model's files that are no parameters, such as the corrections of DeepSeek's routers,
    under the names under which they are sent: engines that gave their memory up have them no more."""
    name = sent_name(model)
    return {name(own): buffer for own, buffer in plain_buffers(model).items() if buffer.is_floating_point()}
