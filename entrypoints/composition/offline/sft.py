"""The composition root of `rollgrad train sft`."""

from functools import partial
from typing import Any

from rollgrad.adapters.chat.token_bytes import token_bytes
from rollgrad.adapters.data.examples.streaming import demonstration
from rollgrad.application.settings.sft import SFTRun, SupervisedAggregation
from rollgrad.domain.algorithms.losses.supervised import SupervisedObjective
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.offline.container import OfflineContainer, complete
from rollgrad.entrypoints.composition.offline.preparation import make_budget, make_stream, make_total_steps


def sft_container(config: SFTRun) -> OfflineContainer:
    """Returns the container of a validated run of supervised fine-tuning."""
    container = OfflineContainer(config=config, make=providers.Object(sft_container))
    learned: providers.Provider[Any] = container.examples
    if config.data.stream:
        learned = providers.Singleton(make_stream, container.preparation, config.train, demonstration)
    budget = providers.Callable(make_budget, config.train, container.examples)
    complete(
        container,
        pack=providers.Object(
            partial(
                pack_demonstrations,
                sequence_mean=config.train.loss_aggregation is SupervisedAggregation.SEQUENCE_MEAN,
            )
        ),
        objective=providers.Singleton(
            SupervisedObjective,
            loss=config.train.loss,
            label_smoothing=config.train.label_smoothing,
            bytes_V=providers.Callable(token_bytes, container.tokenizer),
        ),
        learned=learned,
        held_out=container.eval_examples,
        budget=budget,
        total_steps=providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt, budget),
        correct=providers.Object(True),
        mean=providers.Object(config.train.label_smoothing > 0),
        neftune_alpha=providers.Object(config.train.neftune_alpha),
    )
    return container
