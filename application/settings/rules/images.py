"""Rules of runs whose prompts or examples have images. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync, ModelConfig
from rollgrad.application.settings.sections.examples import RowsConfig


def image_problems(config: RLConfig) -> Iterator[str]:
    """Yields what images in prompts do not go with."""
    key = config.data.image_key
    if key is None:
        return
    known = f"data.image_key is {key!r}, but "
    yield from _divided_problems(known, config)
    if config.actor.lora.sync is LoraSync.ADAPTER:
        yield f"{known}vLLM computes no adapters beside images here: leave out --actor.lora.sync."
    yield from _frozen_problems(config.actor)


def example_image_problems(run: OfflineRun) -> Iterator[str]:
    """Yields what images in examples do not go with."""
    key = getattr(run.data, "image_key", None)
    if key is None:
        return
    known = f"data.image_key is {key!r}, but "
    yield from _divided_problems(known, run)
    yield from _frozen_problems(run.actor)
    if run.data.num_workers != RowsConfig().num_workers:
        yield f"{known}images are read in the run's own process: leave out --data.num_workers."


def _frozen_problems(actor: ModelConfig) -> Iterator[str]:
    """Yields what a tower that is not trained does not go with."""
    if getattr(actor, "freeze_visual_encoder", False) and actor.lora.rank:
        yield (
            "actor.freeze_visual_encoder is on, but adapters are of the language model alone: leave out "
            "--actor.freeze_visual_encoder."
        )


def _divided_problems(known: str, config: RLConfig | OfflineRun) -> Iterator[str]:
    """Yields the ways of dividing a model in which its processes see no images; `known` begins each sentence."""
    for name in ("sequence_parallel_size", "tensor_parallel_size"):
        if config.cluster.enable and getattr(config.ds, name) > 1:
            yield f"{known}processes that share sequences or layers are given none: leave out --ds.{name}."


def unkept_problems(config: RLConfig) -> Iterator[str]:
    """Yields what judges kept replies by images that are not kept with them."""
    key = config.data.image_key
    if key is not None and config.reward.model_name_or_path is not None:
        yield (
            f"data.image_key is {key!r}, but replies are kept without their images, so that no reward model can judge "
            "them: score them by --reward.function_path or --reward.verifier."
        )
