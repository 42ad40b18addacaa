"""The composition root of `rollgrad train dpo`."""

from dependency_injector import providers

from rollgrad.adapters.data.examples.preparation import PreparedExamples, PreparedPairs
from rollgrad.application.settings.dpo import DPORun, has_reference
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.examples import make_total_steps
from rollgrad.entrypoints.composition.reference import ReferencedContainer, References, make_referenced_roles


def make_dpo_roles(run: DPORun) -> dict[str, Role]:
    """Returns the processes of the models in a cluster."""
    return make_referenced_roles(run, compared=has_reference(run.dpo))


def make_pairs(
    run: DPORun, examples: PreparedExamples | ExampleSource[Preference], references: References, setting: str
) -> ExampleSource[Preference]:
    """Returns the pairs of prepared examples, with the reference's log-probs if a loss reads them; `setting` names the
    data.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    pairs = PreparedPairs(examples) if isinstance(examples, PreparedExamples) else examples
    if not has_reference(run.dpo):
        return pairs
    return references.of(pairs, examples, setting=setting, otherwise="the loss would not begin at log 2")


class DPOContainer(ReferencedContainer):
    """All objects of a run over preference pairs; `config` is the validated `DPORun`. `dpo_container` makes it."""

    pairs = providers.Singleton(
        make_pairs,
        ReferencedContainer.config,
        ReferencedContainer.examples,
        ReferencedContainer.references,
        "data.dataset",
    )
    eval_pairs = providers.Singleton(
        make_pairs,
        ReferencedContainer.config,
        ReferencedContainer.eval_examples,
        ReferencedContainer.references,
        "eval.dataset",
    )


def dpo_container(config: DPORun) -> DPOContainer:
    """Returns the container of a run with these settings."""
    container = DPOContainer(config=config, make=providers.Object(dpo_container))
    container.override_providers(
        pack=providers.Object(pack_preferences),
        objective=providers.Singleton(PreferenceObjective, settings=config.dpo),
        learned=container.pairs,
        held_out=container.eval_pairs,
        total_steps=providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt),
        actor_steps=container.total_steps,  # a process of a cluster is told the number, and prepares no data
        roles=providers.Callable(make_dpo_roles, config),
        colocated=providers.Object([set(make_dpo_roles(config))]),  # the reference rests while the actor trains
    )
    return container
