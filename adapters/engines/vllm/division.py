"""The sizes by which vLLM divides a model, by its own rules, before anything is loaded.

The rules are those of vLLM's layers (`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`,
`fused_moe/config.py`) and of its `ModelConfig.verify_with_parallel_config`; vLLM itself breaks most of them with a bare
assertion in each of its processes, after the start. Limits: encoders of images are not looked at, and which classes
support pipelines vLLM says itself when it starts.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY_STEP = 64
"""Rows of embeddings are filled up to a multiple of it (`DEFAULT_VOCAB_PADDING_SIZE`)."""
KEY_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names of a number in configurations, in vLLM's order (`model_arch_config_convertor.py`)."""


def division_problems(
    config: Any,
    tensor: int,
    pipeline: int,
    *,
    section: str = "vllm.",
    extra: Mapping[str, Any] = MappingProxyType({}),
    gpus: int | None = None,
) -> Iterator[str]:
    """Yields a sentence for each rule of vLLM that a division of a model breaks.

    Args:
        config: transformers' configuration of the model.
        tensor: processes that share each layer, `tensor_parallel_size`.
        pipeline: stages of layers, `pipeline_parallel_size`.
        section: section of the flags that set them.
        extra: other engine arguments.
        gpus: number of GPUs that vLLM has here; None where it is on CPUs or elsewhere.
    """
    if gpus is not None and tensor * pipeline > gpus:
        yield (
            f"{section}tensor_parallel_size {tensor} times {section}pipeline_parallel_size {pipeline} is "
            f"{tensor * pipeline} processes, each with a GPU of its own, but this machine has {gpus}: lower them."
        )
    text = config.get_text_config(decoder=True)
    rules = [*_rules(text, experts_divided=not extra.get("enable_expert_parallel"))]
    most = 2 * tensor if gpus is None else min(2 * tensor, gpus)
    fitting = [size for size in range(1, most + 1) if all(holds(size) for _, holds in rules)]
    nearest = [*[size for size in fitting if size < tensor][-1:], *[size for size in fitting if size > tensor][:1]]
    for what, holds in rules:
        if not holds(tensor):
            yield (
                f"{section}tensor_parallel_size is {tensor}, but vLLM divides the model's {what} evenly over so many "
                f"processes: set --{section}tensor_parallel_size to {' or '.join(map(str, nearest))}."
            )
    layers = _number(text, "num_hidden_layers")
    if layers and pipeline > layers:
        yield (
            f"{section}pipeline_parallel_size is {pipeline}, but the model has {layers} layers, and every stage needs "
            f"one: set --{section}pipeline_parallel_size to {layers} at most."
        )


def _rules(text: Any, *, experts_divided: bool) -> Iterator[tuple[str, Callable[[int], bool]]]:
    """Yields each thing that vLLM divides, and a function that says whether it can be divided over a number of
    processes; with `experts_divided` also what is in each expert, not the experts alone."""
    heads = _number(text, "num_attention_heads")
    if heads:
        yield f"{heads} attention heads", lambda size: heads % size == 0
    keys = _number(text, *KEY_HEADS) or heads
    if keys and not _number(text, "kv_lora_rank"):
        yield f"{keys} heads of keys and values", lambda size: max(keys, size) % min(keys, size) == 0
    vocabulary = _number(text, "vocab_size")
    rows = -(-vocabulary // VOCABULARY_STEP) * VOCABULARY_STEP
    yield f"{rows} rows of embeddings (a vocabulary of {vocabulary})", lambda size: rows % size == 0
    mixture = bool(_number(text, *EXPERTS))
    width = _number(text, *(("moe_intermediate_size", "intermediate_size") if mixture else ("intermediate_size",)))
    if experts_divided or not mixture:
        yield f"{width} inner values of {'an expert' if mixture else 'a layer'}", lambda size: width % size == 0


def _number(config: Any, *names: str) -> int:
    """Returns the first of these numbers that a configuration has; 0 if it has none, or one for each layer."""
    value = next((found for name in names if (found := getattr(config, name, None)) is not None), 0)
    return value if isinstance(value, int) else 0
