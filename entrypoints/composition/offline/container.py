"""The container that trainers over examples share: examples, epochs over them, and the run."""

from collections.abc import Callable
from typing import Any

from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.application.learning.examples import ExampleLearner
from rollgrad.application.pipelines.epochs import Epochs, ExampleEvaluation, TokenBudget
from rollgrad.application.pipelines.run import Run
from rollgrad.application.settings.derived import ranks, shares_of_pass, tokens_per_pass
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.entrypoints.composition.base import BaseContainer, make_schedule
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.offline.preparation import (
    Preparation,
    make_eval_examples,
    make_examples,
    make_total_examples,
    make_total_steps,
)
from rollgrad.entrypoints.description import Description, describe_run

LESS_MEMORY = (
    "lower --train.max_tokens_per_micro_batch or --data.max_tokens, or turn on --actor.gradient_checkpointing or "
    "--actor.offload_activations."
)


def make_roles(run: OfflineRun) -> dict[str, Role]:
    """Returns the processes of the model in a cluster."""
    return {"actor": Role(ranks(run), run.actor.num_gpus_per_node)}


def evaluation_kind(dataset: str | None) -> str:
    """Returns whether there is something to evaluate on."""
    return "none" if dataset is None else "examples"


def describe_examples(config: Any, examples: Any) -> Description:
    """Returns the description of a run on these examples; a caller's own have no fingerprint."""
    if not isinstance(examples, PreparedExamples):
        return describe_run(config, None)
    return describe_run(config, examples.origin, examples.written_on)


def if_evaluated(config: providers.Provider[Any], made: providers.Provider[Any]) -> providers.Selector[Any]:
    """Returns the provider of a part of evaluation: of None where there is nothing to evaluate on, else `made`."""
    return providers.Selector(
        providers.Callable(evaluation_kind, config.provided.eval.dataset), examples=made, none=providers.Object(None)
    )


def set_names(examples: object) -> Callable[[Any], str] | None:
    """Returns the function that names the dataset of an example; None where there is one, or a caller's own."""
    names = examples.names if isinstance(examples, PreparedExamples) else ()
    return (lambda example: names[example.row]) if names else None


class OfflineContainer(BaseContainer):
    """All objects of a run over examples. A trainer says how they become a batch (`pack`), what their loss is
    (`objective`), and in which form they are learned from and evaluated on (`learned`, `held_out`)."""

    pack: providers.Provider[Any] = providers.Dependency()
    objective: providers.Provider[Any] = providers.Dependency()
    learned: providers.Provider[Any] = providers.Dependency()
    held_out: providers.Provider[Any] = providers.Dependency()
    budget: providers.Provider[TokenBudget | None] = providers.Object(None)
    first: providers.Provider[Any] = providers.Object(None)
    """Objects that are made before models are loaded, because data or settings may be wrong for this trainer."""

    preparation = providers.Singleton(
        Preparation,
        BaseContainer.config.provided.data,
        BaseContainer.config.provided.actor.model_name_or_path,
        BaseContainer.tokenizer,
        BaseContainer.codec,
        BaseContainer.image_renderer,
    )
    examples = providers.Singleton(make_examples, preparation, BaseContainer.config.provided.train)
    eval_examples = if_evaluated(
        BaseContainer.config,
        providers.Singleton(make_eval_examples, preparation, BaseContainer.config.provided.eval),
    )
    learner = providers.Singleton(
        ExampleLearner,
        BaseContainer.policy,
        pack=pack,
        objective=objective,
        max_tokens=providers.Callable(tokens_per_pass, BaseContainer.config),
        shares=providers.Callable(shares_of_pass, BaseContainer.config),
    )
    steps = providers.Singleton(
        Epochs,
        learner,
        learned,
        batch_size=BaseContainer.config.provided.train.batch_size,
        budget=budget,
        total=providers.Callable(make_total_examples, BaseContainer.config.provided.train, learned),
        seed=BaseContainer.config.provided.train.seed,
        clock=BaseContainer.clock,
    )
    eval_names = providers.Callable(set_names, eval_examples)
    evaluation = if_evaluated(
        BaseContainer.config, providers.Singleton(ExampleEvaluation, learner, held_out, eval_names)
    )
    description = providers.Singleton(describe_examples, BaseContainer.config, examples)
    run = providers.Singleton(  # the schedule first: data that cannot be used are refused before the model is loaded
        Run,
        schedule=providers.Callable(
            make_schedule, BaseContainer.config, BaseContainer.total_steps, eval_examples, first
        ),
        steps=steps,
        models=learner,
        evaluation=evaluation,
        sink=BaseContainer.sink,
        sample_log=providers.Object(None),
        on_step=BaseContainer.on_step,
        checkpoints=BaseContainer.checkpoints,
        clock=BaseContainer.clock,
        watch=providers.Callable(LearningWatch, providers.Callable(LearningSettings, steps=BaseContainer.total_steps)),
        description=description,
        less_memory=LESS_MEMORY,
        usage=BaseContainer.usage,
        profile=BaseContainer.profile,
    )


def complete(container: OfflineContainer, **own: providers.Provider[Any]) -> None:
    """Gives the container of a run its trainer's `own` providers, and those that most trainers share: the number of
    steps, and the processes in a cluster."""
    config = container.config()
    container.override_providers(
        **{
            "total_steps": providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt),
            "actor_steps": container.total_steps,  # a process of a cluster is told the number, and prepares no data
            "roles": providers.Callable(make_roles, config),
            **own,
        }
    )
