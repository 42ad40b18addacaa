"""The sizes of a model that has not been loaded, for the plan of a run's memory."""

import math
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from rollgrad.adapters.models.torch.experts.expert_parallel import expert_stacks
from rollgrad.adapters.models.torch.layers.attention import check_layers
from rollgrad.adapters.models.torch.layers.images import leaves_tower_out, model_factory
from rollgrad.adapters.models.torch.layers.recurrent_layers import attending_layers
from rollgrad.adapters.models.torch.layers.shared_recurrence import require_heads
from rollgrad.adapters.models.torch.loading.lora import adapter_numbers
from rollgrad.adapters.models.torch.loading.quantised import quantised_numbers
from rollgrad.adapters.models.torch.planning.pass_memory import StateSizes, counted_states
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.sections.actor import AdapterConfig, LoraConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError


def model_shape(
    key: str,
    name: str,
    lora: AdapterConfig | None = None,
    *,
    expert_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    images: bool = False,
) -> ModelShape:
    """Returns the shape of a model from its configuration alone: it is built without memory for its weights.

    Args:
        key: setting that names the model.
        name: hub name or directory.
        lora: settings of its adapters; None for none.
        expert_parallel_size: processes that divide its experts.
        sequence_parallel_size: processes that divide its sequences.
        images: whether it is loaded to see images.

    Raises:
        CheckpointError: there is no such model.
        ConfigurationError: a target module of `lora` is no linear layer of it; it has no 4-bit form; its experts or
            states cannot be divided; or it is an actor without the experts that are to be divided.
    """
    try:
        built = _built(name, images=images)
    except Exception as error:  # the code of a model's class and its settings may raise anything
        raise CheckpointError(f"{key} is {name!r}, which is no readable model: check --{key}.") from error
    settings, loaded = built.settings, built.loaded
    text = settings.get_text_config()
    section = key.partition(".")[0]
    if section != "reward":  # processes of a reward model share no sequences
        require_heads(built.states.heads, sequence_parallel_size)
    divides_experts = expert_parallel_size > 1
    stacks = expert_stacks(built.model, expert_parallel_size, required=section == "actor") if divides_experts else []
    kv_heads, head_dim = max(built.cache_shapes, key=math.prod, default=(0, 0))
    embedding, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings()
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in loaded.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=getattr(text, "num_attention_heads", 0) or 0,
        adapters=adapter_numbers(loaded, lora, at=f"{section}.lora") if lora is not None and lora.rank else 0,
        quantised=quantised_numbers(loaded) if isinstance(lora, LoraConfig) and lora.load_in_4bit else 0,
        embedding=embedding.numel(),
        experts=sum(parameter.numel() for stack in stacks for parameter in stack.parameters()),
        experts_per_token=getattr(text, "num_experts_per_tok", stacks[0].num_experts) if stacks else 0,  # all at most
        tied=head is not None and head.weight is embedding,
        stored=0 if settings.dtype is None else settings.dtype.itemsize,
        attending=len(built.cache_shapes) if built.states.nbytes else None,
        state_bytes=built.states.nbytes,
        columns=built.states.columns,
    )


@frozen(kw_only=True, eq=False)
class _Built:
    """A model without memory for its weights, and what a token costs in its layers."""

    settings: Any
    """Its `PretrainedConfig`."""
    model: Any
    """The language model."""
    loaded: Any
    """The model as the run loads it: `model`, or the one with the tower of images around it."""
    cache_shapes: list[tuple[int, int]]
    """(heads, width) of the keys and values of each layer that attends; none if the embedded engine keeps none."""
    states: StateSizes
    """The sizes of recurrent states; all 0 if the embedded engine keeps none."""


def _built(name: str, *, images: bool) -> _Built:
    """Builds a model from its configuration, on the meta device."""
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(str(Path(name).expanduser()))
    with torch.device("meta"):
        model = model_factory(settings).from_config(settings)
        sees = images and leaves_tower_out(settings)
        loaded = model_factory(settings, images=True).from_config(settings) if sees else model
    keeps_keys = _keeps_keys(model)
    return _Built(
        settings=settings,
        model=model,
        loaded=loaded,
        cache_shapes=_cache_shapes(settings) if keeps_keys else [],
        states=counted_states(model) if keeps_keys else StateSizes(),
    )


def _keeps_keys(model: Any) -> bool:
    """Returns whether the embedded engine keeps keys and values of a model, and does not compute all anew."""
    try:
        check_layers(model)
    except ConfigurationError:
        return False
    return True


def cache_numbers(settings: Any) -> int:
    """Returns how many numbers of keys and values a token has in the caches of all layers of a model with these
    settings."""
    return sum(2 * math.prod(shape) for shape in _cache_shapes(settings))


def _cache_shapes(settings: Any) -> list[tuple[int, int]]:
    """Returns `_cache_shape` of each layer."""
    text = settings.get_text_config()
    attends = attending_layers(text)
    shapes = [_cache_shape(text.per_layer_config[index]) for index in attends]  # some are unlike
    # Its code, not its settings, says that layers with windows have twice the heads.
    if text.model_type == "mimo_v2_flash":
        windows = [text.layer_types[index] == "sliding_attention" for index in attends]
        return [(heads * (1 + windowed), width) for (heads, width), windowed in zip(shapes, windows, strict=True)]
    return shapes


def _cache_shape(text: Any) -> tuple[int, int]:
    """Returns (heads, mean width of keys and values) that a token has in the cache of a layer with these settings."""
    heads: int = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None:  # latent attention: the cache holds what each head computes
        return heads, -(-(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2)
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    width = -(-(width + (getattr(text, "v_head_dim", None) or width)) // 2)
    return getattr(text, "num_key_value_heads", None) or heads, width
