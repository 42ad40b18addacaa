"""Loads transformers models for packed training, with errors a user can act on."""

from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.torch.attention import install_attention
from rollgrad.domain.errors import CheckpointError


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively (CUDA, AMX, AVX512-BF16), else float32: without
    native support a CPU's bfloat16 product is several times slower than its float32 one."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    native = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if device.type == "cuda"
        else torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if native else torch.float32


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal_lm(name_or_path: str, *, dtype: torch.dtype, device: torch.device, flag: str) -> Any:
    """An `AutoModelForCausalLM` in eval mode with packed attention installed.

    Args:
        name_or_path: hub name or directory.
        dtype: compute format of the weights.
        device: where they go.
        flag: command-line flag to name in errors.

    Raises:
        CheckpointError: there is no such model, or it cannot be read.
    """
    from transformers import AutoModelForCausalLM

    model = _from_pretrained(AutoModelForCausalLM, name_or_path, flag, dtype=dtype).to(device).eval()
    install_attention(model)
    return model


def load_tokenizer(name_or_path: str, *, flag: str) -> Any:
    """The model's tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, name_or_path, flag)


def _from_pretrained(factory: Any, name_or_path: str, flag: str, **kwargs: Any) -> Any:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1
    path = Path(name_or_path).expanduser()
    if looks_local and "/" in name_or_path and not path.exists():
        raise CheckpointError(f"{flag} is {name_or_path!r}: there is no such directory.")
    try:
        return factory.from_pretrained(str(path) if path.exists() else name_or_path, **kwargs)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, which cannot be loaded as a Hugging Face model: {first_line}"
        ) from error
