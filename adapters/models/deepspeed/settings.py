"""DeepSpeed's configuration, and the optimizer that it steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor, nn

from rollgrad.adapters.models.deepspeed.extra import config_problems, merged
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.settings.sections.ds import BUCKET_NUMBERS, GRADIENTS, PARAMETERS
from rollgrad.domain.control.loss_scale import FIRST
from rollgrad.domain.errors import ConfigurationError, raise_together

ALIGNMENT = 1024
"""Buckets are a multiple of this, as DeepSpeed requires."""

WHOLE_GROUP = 2**62
"""Largest number of parameters that DeepSpeed steps together: no limit."""

NEVER = 2**31 - 1
"""Steps between DeepSpeed's own reports."""


@frozen(kw_only=True)
class DeepSpeedSettings:
    """How a model is divided and offloaded."""

    zero_stage: int = 2
    """0 copies everything, 1 divides the optimizer's state, 2 gradients too, 3 parameters too."""
    adam_offload: bool = False
    """Keeps the optimizer's state in the CPU's memory."""
    param_offload: bool = False
    """Keeps the parameters in the CPU's memory, at stage 3."""
    tensor_parallel_size: int = 1
    """Neighbouring processes that divide each layer among them; ZeRO then divides the share of each."""
    extra: Mapping[str, Any] = Factory(dict)
    """Further keys of DeepSpeed's configuration."""


def with_masters(division: DeepSpeedSettings, dtype: torch.dtype) -> DeepSpeedSettings:
    """Returns a division at whose stage DeepSpeed keeps float32 masters of parameters of `dtype` in the optimizer that
    is handed to it: in 16 bits it does so from stage 2 on."""
    if dtype == torch.float32:
        return division
    return evolve(division, zero_stage=max(division.zero_stage, GRADIENTS))


def number_format(parameter: Tensor) -> dict[str, Any]:
    """Returns DeepSpeed's settings of the number format of a module. The loss scale of float16 is constant in them:
    `DeepSpeedModule` overrides it by the rule that a single process follows, too.

    Raises:
        ConfigurationError: DeepSpeed does not compute float16 on this machine.
    """
    if parameter.dtype == torch.float16:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise ConfigurationError(
                "actor.dtype is float16 with cluster.enable, but without a GPU DeepSpeed computes float16 only where "
                "the processor does (AVX512-FP16): set --actor.dtype bfloat16, or leave --cluster.enable out."
            )
        return {"fp16": {"enabled": True, "loss_scale": FIRST}}
    return {"bf16": {"enabled": True}} if parameter.dtype == torch.bfloat16 else {}


def make_adam(groups: list[dict[str, Any]], *, settings: OptimizerSettings, division: DeepSpeedSettings) -> Any:
    """Returns an AdamW of parameter groups: DeepSpeed's if the state is in CPU memory beside a GPU, else torch's."""
    constants: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    if division.adam_offload and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **constants, adamw_mode=True)
    return torch.optim.AdamW(groups, **constants, fused=True)


def engine_config(
    settings: OptimizerSettings, division: DeepSpeedSettings, parameters: Sequence[nn.Parameter], *, clips: bool
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration for trained `parameters`; `clips`: whether DeepSpeed clips gradients itself.

    Raises:
        ConfigurationError: `division.extra` has keys that DeepSpeed does not read, or that are set here.
    """
    raise_together([ConfigurationError(problem) for problem in config_problems(division.extra)])
    whole_group = division.zero_stage == PARAMETERS and settings.muon is not None
    if whole_group and "sub_group_size" in division.extra.get("zero_optimization", {}):
        raise ConfigurationError(
            "ds.extra.zero_optimization.sub_group_size is set, but at ds.zero_stage 3 Muon steps all matrices "
            "together: leave --ds.extra.zero_optimization.sub_group_size out, or set --actor.optim adam."
        )
    offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    numbers = sum(parameter.numel() for parameter in parameters)
    bucket = min(BUCKET_NUMBERS, -(-numbers // ALIGNMENT) * ALIGNMENT)  # DeepSpeed allocates it at once
    zero: dict[str, Any] = {
        "stage": division.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if division.adam_offload:
        zero["offload_optimizer"] = offload
    if division.param_offload:
        zero["offload_param"] = offload
    if whole_group:
        zero["sub_group_size"] = WHOLE_GROUP
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,  # any number of backward passes, then a step
        "gradient_clipping": settings.max_norm if clips else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": NEVER,
        **number_format(parameters[0]),
    }
    return merged(config, division.extra)
