"""Rules of LoRA. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.config import RLConfig
from rollgrad.application.model_config import ALL_LINEAR, LoraConfig


def lora_problems(config: RLConfig) -> Iterator[str]:
    """What is wrong with the adapters."""
    lora, default = config.actor.lora, LoraConfig()
    for key in ("alpha", "target_modules"):
        value = getattr(lora, key)
        if lora.rank == 0 and value != getattr(default, key):
            yield (
                f"actor.lora.{key} is {value}, but actor.lora.rank is 0, which trains all weights: set "
                f"--actor.lora.rank above 0, or leave --actor.lora.{key} out."
            )
    if lora.target_modules != ALL_LINEAR and ALL_LINEAR[0] in lora.target_modules:
        yield (
            f"actor.lora.target_modules is {lora.target_modules}, but {ALL_LINEAR[0]} already means every linear "
            "layer: leave the other names out of --actor.lora.target_modules."
        )
