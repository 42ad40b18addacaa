"""Rules of runs whose prompts or examples have images. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.application.settings.sections.examples import ExampleModelConfig, RowsConfig


def image_problems(config: RLConfig) -> Iterator[str]:
    """Yields what images in prompts do not go with."""
    key = config.data.image_key
    if key is None:
        return
    known = f"data.image_key is {key!r}, but "
    yield from _divided_problems(known, config)
    yield from _frozen_problems(config.actor)


def example_image_problems(run: OfflineRun) -> Iterator[str]:
    """Yields what images in examples do not go with."""
    key = run.data.image_key
    if key is None:
        return
    known = f"data.image_key is {key!r}, but "
    yield from _divided_problems(known, run)
    yield from _frozen_problems(run.actor)
    if run.data.num_workers != RowsConfig().num_workers:
        yield f"{known}images are read in the run's own process: leave out --data.num_workers."


def _frozen_problems(actor: ActorConfig | ExampleModelConfig) -> Iterator[str]:
    """Yields the settings that exclude a tower that is not trained."""
    if actor.freeze_visual_encoder and actor.lora.rank:
        yield (
            "actor.freeze_visual_encoder is on, but adapters are of the language model alone: leave out "
            "--actor.freeze_visual_encoder."
        )


def _divided_problems(known: str, config: RLConfig | OfflineRun) -> Iterator[str]:
    """Yields the way of dividing a model in which its processes see no images; `known` begins the sentence."""
    if config.cluster.enable and config.ds.tensor_parallel_size > 1:
        yield f"{known}processes that share layers are given none: leave out --ds.tensor_parallel_size."
