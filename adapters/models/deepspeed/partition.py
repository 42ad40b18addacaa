"""Hands weights of which a process has a share (`adapters/models/torch/loading/weight_shards.py`) to ZeRO stage 3.

Does not own: how a model is loaded, nor what ZeRO does with it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, distributed, nn

from rollgrad.adapters.models.torch.heads.scorers import Scorer
from rollgrad.adapters.models.torch.loading.weight_shards import (
    is_sharded,
    parameter_places,
    replace_parameter,
    together,
)


def fetch_heads(module: nn.Module) -> None:
    """Makes ZeRO-3 put the vocabulary's head together for the part of `module` that reads its weight."""
    from deepspeed import zero

    for scorer in (part for part in module.modules() if isinstance(part, Scorer)):
        for weight in (scorer.head.weight, scorer.head.bias):
            if weight is not None:
                zero.register_external_parameter(scorer, weight)


def fetch_mixtures(module: nn.Module) -> None:
    """Makes ZeRO-3 fetch all experts of a layer together: processes send tokens to different experts, but must fetch
    the same parameters."""
    from deepspeed.utils import set_z3_leaf_modules

    mixtures = {type(part) for part in module.modules() if hasattr(part, "experts")}
    if mixtures:
        set_z3_leaf_modules(module, list(mixtures))


def partition(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Divides a module with sharded weights as the ZeRO-3 of DeepSpeed's `config` does, one parameter at a time; any
    other module is left to DeepSpeed, which divides it when it is whole.

    All parameters get the format of the first that is sharded, as DeepSpeed's own division gives them one.
    """
    dtype = next((parameter.dtype for parameter in module.parameters() if is_sharded(parameter)), None)
    if dtype is None:
        return
    from deepspeed import zero

    places = parameter_places(module)
    first: Any = None
    while places:
        sharded = next(iter(places))
        owners = places.pop(sharded)
        whole: Any = nn.Parameter(together(sharded).to(dtype), requires_grad=sharded.requires_grad)
        replace_parameter(owners, whole)
        del sharded  # the last reference to this process's share, which ZeRO's takes the place of
        if first is None:
            first = whole
            zero.Init(module=nn.ParameterList([whole]), config_dict_or_path=dict(config))
        else:
            first.convert_to_zero_parameters([whole])


def own_run(parameter: Any) -> tuple[int, Tensor] | None:
    """Returns what this process has of a flattened parameter, and the index of its first element: what ZeRO-3 keeps of
    it here, or an equal share of a parameter that all processes have. None if several processes keep the same."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if not hasattr(parameter, "ds_tensor"):
        most = -(-parameter.numel() // size)
        return min(rank * most, parameter.numel()), parameter.detach().reshape(-1)[rank * most : (rank + 1) * most]
    if parameter.ds_zero_partition_world_size != size:
        return None
    kept = parameter.ds_tensor.detach()
    begin = parameter.ds_zero_partition_rank * kept.numel()
    return begin, kept[: max(0, parameter.ds_numel - begin)]  # the last processes' parts end with memory that pads them
