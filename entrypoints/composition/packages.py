"""Optional packages that the settings of any run ask for."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from rollgrad.adapters.engines.vllm.launch import NO_VLLM
from rollgrad.adapters.models.deepspeed.processes import NO_DEEPSPEED
from rollgrad.adapters.models.torch.loading.lora import NO_PEFT
from rollgrad.adapters.models.torch.loading.quantised import NO_BITSANDBYTES
from rollgrad.adapters.ray.session import NO_RAY
from rollgrad.adapters.tracking.tensorboard import NO_TENSORBOARD
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.logger import is_own_tracker
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import MissingExtraError, raise_together

NO_TRACKER = "--logger.report_to names {0}, but it is not installed: pip install rollgrad[{0}]"


def check_packages(config: Any) -> None:
    """Checks that the packages are installed which a run of any kind needs on this machine, and imports none of them.

    Raises:
        MissingExtraError, ManyProblemsError: some are not.
    """
    missing = [text for package, text in _wanted(config) if importlib.util.find_spec(package) is None]
    raise_together([MissingExtraError(text) for text in missing])


def _wanted(config: Any) -> Iterator[tuple[str, str]]:
    """Yields packages, each with the error where it is not installed."""
    cluster, logger = config.cluster, config.logger
    if cluster.enable:
        yield "ray", NO_RAY
    if cluster.address is None:  # else it is other machines that train and sample
        if cluster.enable and cluster.strategy is Strategy.DEEPSPEED:
            yield "deepspeed", NO_DEEPSPEED
        if hasattr(config, "rollout") and config.rollout.engine is Engine.VLLM:
            yield "vllm", NO_VLLM
        for section in ("actor", "critic"):
            lora: Any = getattr(getattr(config, section, None), "lora", None)
            if getattr(lora, "rank", 0):
                yield "peft", NO_PEFT.format(at=f"{section}.lora", rank=lora.rank)
        if config.actor.lora.load_in_4bit:
            yield "bitsandbytes", NO_BITSANDBYTES
            yield "accelerate", NO_BITSANDBYTES
    if logger.tensorboard_dir is not None:
        yield "tensorboard", NO_TENSORBOARD
    for name in logger.report_to:
        if not is_own_tracker(name):
            yield name, NO_TRACKER.format(name)
