"""Decides how much of a GPU's memory vLLM's engines take, and whether they give it to models that train."""

from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.weight_backend import shares_gpus

ALONE, SHARED = 0.9, 0.5
"""Shares of an engine that has its GPU for itself, and of one on the GPU of a model that trains, whose weights and
optimizer stay there."""


def engine_share(config: RLConfig) -> float:
    """Returns the share of a GPU's memory that an engine takes while it samples."""
    asked = config.vllm.gpu_memory_utilization
    if asked is not None:
        return asked
    return SHARED if shares_gpus(config) else ALONE


def engines_sleep(config: RLConfig) -> bool:
    """Returns whether vLLM's engines give their memory to the models on their GPUs while these train: where rollouts
    and updates take turns."""
    return config.rollout.engine is Engine.VLLM and shares_gpus(config) and not config.train.async_enable
