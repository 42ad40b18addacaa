"""The composition root of `rollgrad train prm`."""

from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.data.examples.prepared import PreparedExamples, PreparedSteps
from rollgrad.adapters.data.examples.streaming import solution
from rollgrad.adapters.models.torch.loading.weight_shards import Shard
from rollgrad.application.settings.prm import PRMRun, StepModelConfig
from rollgrad.domain.algorithms.losses.process_reward import StepObjective
from rollgrad.domain.batches.examples import pack_steps
from rollgrad.domain.episodes.examples import StepLabels
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.models import make_trained_actor
from rollgrad.entrypoints.composition.offline.container import OfflineContainer, complete
from rollgrad.entrypoints.composition.offline.preparation import make_stream
from rollgrad.entrypoints.composition.vocabulary import reward_token_ids


def make_step_model(
    actor: StepModelConfig,
    seed: int,
    reward_tokens: tuple[str, str],
    shard: Shard | None = None,
    images: ImageRenderer | None = None,
) -> Any:
    """Loads the model that is trained; the `reward_tokens` are saved in its config.json."""
    model = make_trained_actor(actor, seed, shard, images)
    model.config.reward_tokens = list(reward_tokens)
    return model


def make_solutions(examples: PreparedExamples | ExampleSource[StepLabels]) -> ExampleSource[StepLabels]:
    """Returns the solutions of prepared examples."""
    return PreparedSteps(examples) if isinstance(examples, PreparedExamples) else examples


def prm_container(config: PRMRun) -> OfflineContainer:
    """Returns the container of a validated run that trains a process reward model."""
    container = OfflineContainer(config=config, make=providers.Object(prm_container))
    learned: providers.Provider[Any] = providers.Singleton(make_solutions, container.examples)
    if config.data.stream:
        learned = providers.Singleton(make_stream, container.preparation, config.train, solution)
    outcomes = providers.Singleton(reward_token_ids, config.prm.reward_tokens, container.tokenizer)
    complete(
        container,
        pack=providers.Object(pack_steps),
        objective=providers.Singleton(StepObjective),
        outcomes=outcomes,
        first=outcomes,
        actor_model=providers.Singleton(
            make_step_model,
            config.actor,
            config.train.seed,
            config.prm.reward_tokens,
            container.shard,
            container.image_renderer,
        ),
        learned=learned,
        held_out=providers.Singleton(make_solutions, container.eval_examples),
    )
    return container
