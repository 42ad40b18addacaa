"""Frozen weights in 4 bits: NF4 with double quantisation (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of
Quantized LLMs", section 3), kept and computed with by bitsandbytes.

Invariants: every linear layer but the vocabulary's head is in 4 bits, everything else in the compute format; a layer
computes with its dequantised weight in that format, with gradients and without; the same files give the same weights.
Exported weights are dequantised.
Does not own: the adapters beside them (`lora.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.domain.errors import CheckpointError, ConfigurationError, MissingExtraError

NO_BITSANDBYTES = (
    "actor.lora.load_in_4bit is on, but weights in 4 bits need bitsandbytes: pip install rollgrad[qlora], or leave "
    "--actor.lora.load_in_4bit out."
)
"""The error where it is not installed."""


def four_bits(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of transformers' `from_pretrained` for loading in 4 bits, to compute in `dtype` on
    `device`.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    try:
        import accelerate  # noqa: F401 (transformers puts quantised weights on their device by it)
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(NO_BITSANDBYTES) from error
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def finish_loading(model: Any, name_or_path: str, flag: str) -> None:
    """Makes a model that transformers has quantised behave like any other; other models are left alone.

    Raises:
        CheckpointError: its files hold quantised weights, so that engines could not be given the full ones.
        ConfigurationError: it has experts, which would not be quantised.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    if quantizer.pre_quantized:
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose weights are quantised already: name the model that they were made from."
        )
    check_experts(model)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # Otherwise a CPU with native bfloat16 rounds scales and inputs to it if no gradient is needed, and reorders
            # the weight in place.
            layer.support_avx512bf16_for_cpu = False
    quantizer.remove_quantization_config(model)  # saved models are dequantised, with adapters merged


def quantised_numbers(model: Any) -> int:
    """Returns the number of parameters of `model`, which may be on the meta device, that would be in 4 bits.

    Raises:
        ConfigurationError: it has experts, which would not be quantised.
    """
    from transformers.pytorch_utils import Conv1D

    check_experts(model)
    head = model.get_output_embeddings()
    layers = (part for part in model.modules() if isinstance(part, (nn.Linear, Conv1D)) and part is not head)
    return sum(layer.weight.numel() for layer in layers)


def check_experts(model: Any) -> None:
    """Refuses a mixture of experts, whose weights are not in linear layers.

    Raises:
        ConfigurationError: `model` is one.
    """
    if any("experts" in name.split(".") and parameter.ndim > 2 for name, parameter in model.named_parameters()):
        raise ConfigurationError(
            f"actor.lora.load_in_4bit is on, but the experts of {type(model).__name__} have no linear layers, which "
            "alone are quantised: name a model without experts by --actor.model_name_or_path, or leave "
            "--actor.lora.load_in_4bit out."
        )


def is_quantised(parameter: Tensor) -> bool:
    """Returns whether a parameter is in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def is_turned(parameter: Any) -> bool:
    """Returns whether a parameter is in 4 bits, and the transpose of the model's own (GPT-2)."""
    if not is_quantised(parameter):
        return False
    from transformers.pytorch_utils import Conv1D

    return issubclass(parameter.module.source_cls, Conv1D)


def dequantised(parameter: Any) -> Tensor:
    """Returns a parameter in 4 bits dequantised, [out, in] in the compute format; another parameter's own memory."""
    if not is_quantised(parameter):
        weight: Tensor = parameter.detach()
        return weight
    from bitsandbytes.functional import dequantize_4bit

    whole: Tensor = dequantize_4bit(parameter.detach(), parameter.quant_state)
    return whole
