"""The composition root of `rollgrad train sft`."""

from typing import Any

from dependency_injector import providers

from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.algorithms.losses.supervised import SupervisedObjective
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.entrypoints.composition.examples import make_budget, make_stream, make_total_steps
from rollgrad.entrypoints.composition.offline import OfflineContainer, make_roles


def sft_container(config: SFTRun) -> OfflineContainer:
    """Returns the container of a validated run of supervised fine-tuning."""
    container = OfflineContainer(config=config, make=providers.Object(sft_container))
    learned: providers.Provider[Any] = container.examples
    if config.data.stream:
        model = config.actor.model_name_or_path
        learned = providers.Singleton(
            make_stream, config.data, config.train, model, container.tokenizer, container.codec
        )
    budget = providers.Callable(make_budget, config.train, container.examples)
    container.override_providers(
        pack=providers.Object(pack_demonstrations),
        objective=providers.Singleton(
            SupervisedObjective, loss=config.train.loss, label_smoothing=config.train.label_smoothing
        ),
        learned=learned,
        held_out=container.eval_examples,
        budget=budget,
        total_steps=providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt, budget),
        actor_steps=container.total_steps,  # a process of a cluster is told the number, and prepares no data
        correct=providers.Object(True),
        neftune_alpha=providers.Object(config.train.neftune_alpha),
        roles=providers.Callable(make_roles, config),
    )
    return container
