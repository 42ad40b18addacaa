"""Models that are not trained, divided by DeepSpeed as the trained ones are: a reference that is as large as the actor
has no more room.

Does not own: how the models are loaded (`adapters/models/torch/loading/loading.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.partition import fetch_heads, partition
from rollgrad.adapters.models.deepspeed.settings import NEVER, DeepSpeedSettings, number_format
from rollgrad.application.settings.sections.ds import PARAMETERS


def forward_only(module: nn.Module, *, division: DeepSpeedSettings) -> Callable[..., Any]:
    """Returns a callable for the forward pass of a module that is not trained. All processes must call it together if
    its layers or, at ZeRO stage 3, its parameters are divided; below that stage it is whole in each process."""
    size = division.tensor_parallel_size
    if size > 1 or division.zero_stage < PARAMETERS:
        return tensor_parallel.divided(module, size=size)
    import deepspeed

    zero: dict[str, Any] = {"stage": PARAMETERS}
    if division.param_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": NEVER,
        "zero_optimization": zero,
        **number_format(next(module.parameters())),
    }
    partition(module, config)
    fetch_heads(module)
    engine: Callable[..., Any] = deepspeed.initialize(model=module, config=config)[0]
    return engine
