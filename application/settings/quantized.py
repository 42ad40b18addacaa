"""Tells whether vLLM samples in fewer bits than the trainer has, which makes it another policy."""

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine

AS_IT_COMPUTES = ("auto", "bfloat16", "float16", "float32")
"""Formats in vLLM's settings that quantise nothing."""


def quantized_by(weights: str | None, keys_and_values: str | None) -> tuple[str, ...]:
    """Returns vLLM's names of what is quantised with such a `quantization` and `kv_cache_dtype`; none if nothing is."""
    return tuple(name for name in (weights, keys_and_values) if name and name not in AS_IT_COMPUTES)


def quantized_engine(config: RLConfig) -> str | None:
    """Returns the settings by which the engine that the run starts quantises; None if it does not."""
    extra = config.vllm.extra or {}
    if config.rollout.engine is not Engine.VLLM:
        return None
    names = [name for name in ("quantization", "kv_cache_dtype") if quantized_by(extra.get(name), None)]
    return " and ".join(f"vllm.extra.{name} {extra[name]}" for name in names) or None
