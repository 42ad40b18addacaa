"""The sizes of a model that has not been loaded, for the plan of a run's memory."""

import math
from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.models.torch.attention import check_layers
from rollgrad.adapters.models.torch.lora import adapter_numbers
from rollgrad.adapters.models.torch.quantised import quantised_numbers
from rollgrad.application.settings.memory_plan import ModelShape
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError


def model_shape(key: str, name: str, lora: LoraConfig | None = None) -> ModelShape:
    """Returns the shape of a model, with the adapters of `lora`, from its configuration alone: it is built without
    memory for its weights.

    Raises:
        CheckpointError: there is no such model.
        ConfigurationError: a target module of `lora` is no linear layer of it, or it has no 4-bit form.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(str(Path(name).expanduser()))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
        check_layers(model)
        text = settings.get_text_config()
        layers = [text.per_layer_config[index] for index in range(text.num_hidden_layers)]  # Gemma 4's are unlike
        kv_heads, head_dim = max(map(_cache_shape, layers), key=math.prod)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--{key} is {name!r}, which packed training does not compute as it is ({str(error).rstrip('.')}): choose "
            f"another --{key}."
        ) from error
    except Exception as error:  # the code of a model's class and its settings may raise anything
        raise CheckpointError(f"{key} is {name!r}, which is no readable model: check --{key}.") from error
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        adapters=adapter_numbers(model, lora) if lora is not None and lora.rank else 0,
        quantised=quantised_numbers(model) if lora is not None and lora.load_in_4bit else 0,
        embedding=embedding.numel(),
        tied=head is not None and head.weight is embedding,
    )


def _cache_shape(text: Any) -> tuple[int, int]:
    """Returns (heads, mean width of keys and values) that a token has in the cache of a layer with these settings."""
    heads: int = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None:  # latent attention: the cache holds what each head computes
        return heads, -(-(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2)
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return getattr(text, "num_key_value_heads", None) or heads, width
