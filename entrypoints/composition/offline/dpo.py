"""The composition root of `rollgrad train dpo`."""

from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.data.examples.prepared import PreparedExamples, PreparedPairs
from rollgrad.adapters.data.examples.streaming import preference
from rollgrad.application.learning.examples import Pack
from rollgrad.application.learning.ranked import ranked
from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass
from rollgrad.application.settings.dpo import DPORun, has_reference, sorts_pairs
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.losses.transport import UNEQUAL
from rollgrad.domain.batches.examples import ExampleBatch, pack_preferences
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.models import following
from rollgrad.entrypoints.composition.offline.container import complete
from rollgrad.entrypoints.composition.offline.preparation import make_stream
from rollgrad.entrypoints.composition.offline.reference import (
    ReferencedContainer,
    References,
    make_moving_reference,
    make_referenced_roles,
)

NOT_LOG_2 = "the loss would not begin at log 2"


def make_dpo_roles(run: DPORun) -> dict[str, Role]:
    """Returns the processes of the models in a cluster."""
    return make_referenced_roles(run, compared=has_reference(run.dpo) and run.dpo.ref_sync_steps is None)


def make_pairs(
    run: DPORun, examples: PreparedExamples | ExampleSource[Preference], references: References, setting: str
) -> ExampleSource[Preference]:
    """Returns the pairs of prepared examples, with the reference's log-probs if a loss reads them; `setting` names the
    data.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    pairs = PreparedPairs(examples) if isinstance(examples, PreparedExamples) else examples
    if not has_reference(run.dpo) or run.dpo.ref_sync_steps is not None:
        return pairs
    return references.of(pairs, examples, setting=setting, otherwise=NOT_LOG_2)


def check_weights(run: DPORun, *sets: object) -> None:
    """Checks that the pairs of each of some prepared data weigh the same where a loss ranks them.

    Raises:
        DataError: they do not.
    """
    prepared = [examples for examples in sets if isinstance(examples, PreparedExamples)]
    if sorts_pairs(run.dpo) and any(len(set(examples.row_weights.tolist())) > 1 for examples in prepared):
        raise DataError(UNEQUAL)


def make_streamed_pack(
    run: DPORun, first: PreparedExamples | ExampleSource[Preference], references: References
) -> Callable[[Sequence[Preference]], ExampleBatch]:
    """Returns what makes a batch of pairs that are streamed, of which some are the `first`, with the reference's
    log-probs if a loss reads them.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    if not has_reference(run.dpo):
        return pack_preferences
    pairs = PreparedPairs(first) if isinstance(first, PreparedExamples) else first
    reference = references.live(pairs, otherwise=NOT_LOG_2)
    return lambda examples: pack_preferences(reference.of(examples))


def make_ranked_pack(run: DPORun, policy: PolicyModel, pack: Pack[Preference]) -> Pack[Preference]:
    """Returns what packs pairs for losses that compare replies by their rank."""
    return ranked(pack, policy, run.dpo, max_tokens=tokens_per_pass(run), shares=shares_of_pass(run))


def make_moving_pack(run: DPORun, policy: Callable[[], PolicyModel]) -> Pack[Preference]:
    """Returns what packs pairs with the log-probs of a reference that moves toward the policy."""
    reference = make_moving_reference(run, policy, "dpo")
    return lambda pairs: pack_preferences(reference.of(pairs))


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
    pack: providers.Provider[Any] = providers.Object(pack_preferences)
    learned: providers.Provider[Any] = container.pairs
    if config.data.stream:
        pack = providers.Singleton(make_streamed_pack, config, container.examples, container.references)
        learned = providers.Singleton(make_stream, container.preparation, config.train, preference)
    if config.dpo.ref_sync_steps is not None:
        pack = providers.Singleton(make_moving_pack, config, container.policy.provider)
        container.average.override(providers.Object(following(config.dpo.ref_sync_steps, config.dpo.ref_mixup)))
    if sorts_pairs(config.dpo):
        pack = providers.Singleton(make_ranked_pack, config, container.policy, pack)
    complete(
        container,
        pack=pack,
        correct=providers.Object(True),
        collision=providers.Object(config.dpo.wpo),
        objective=providers.Singleton(PreferenceObjective, settings=config.dpo),
        learned=learned,
        held_out=container.eval_pairs,
        first=providers.List(
            container.suits, providers.Callable(check_weights, config, container.examples, container.eval_examples)
        ),
        roles=providers.Callable(make_dpo_roles, config),
        colocated=providers.Object([set(make_dpo_roles(config))]),  # it mostly rests while the actor trains
    )
    return container
