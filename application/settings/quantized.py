"""Tells whether vLLM samples in fewer bits than the trainer has, which makes it another policy."""

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine

AS_IT_COMPUTES = ("auto", "bfloat16", "float16", "float32")
"""Formats in vLLM's settings that quantise nothing."""


def quantized_by(*formats: str | None) -> tuple[str, ...]:
    """Returns those of vLLM's formats, of weights (`quantization`) or of keys and values (`kv_cache_dtype`), that
    quantise."""
    return tuple(name for name in formats if name and name not in AS_IT_COMPUTES)


def quantized_engine(config: RLConfig) -> str | None:
    """Returns the settings by which the engine that the run starts quantises; None if it does not."""
    extra = config.vllm.extra or {}
    if config.rollout.engine is not Engine.VLLM:
        return None
    names = [name for name in ("quantization", "kv_cache_dtype") if quantized_by(extra.get(name))]
    return " and ".join(f"vllm.extra.{name} {extra[name]}" for name in names) or None
