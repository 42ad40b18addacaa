"""The composition root of `rollgrad train kto`."""

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from attrs import frozen

from rollgrad.adapters.data.examples.prepared import PreparedExamples, PreparedLabels
from rollgrad.adapters.data.examples.streaming import labelled
from rollgrad.application.learning.examples import Pack
from rollgrad.application.learning.reference import LiveReference
from rollgrad.application.learning.unpaired import (
    PlacedLabels,
    Places,
    PromptedLabels,
    UnpairedLearner,
    mismatched_references,
)
from rollgrad.application.pipelines.epochs import ExampleEvaluation, coming_steps
from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass
from rollgrad.application.settings.kto import KTORun, UnpairedLoss
from rollgrad.domain.algorithms.losses.unpaired import UnpairedObjective
from rollgrad.domain.batches.examples import pack_labels
from rollgrad.domain.episodes.examples import Label
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.example_source import ExampleSource, ExampleStream
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.score_store import ScoreStore
from rollgrad.entrypoints.composition.cluster import Role
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.models import following
from rollgrad.entrypoints.composition.offline.container import complete, if_evaluated
from rollgrad.entrypoints.composition.offline.preparation import (
    Preparation,
    make_stream,
    make_total_examples,
    make_total_steps,
    starting_position,
)
from rollgrad.entrypoints.composition.offline.reference import (
    ReferencedContainer,
    References,
    make_moving_reference,
    make_referenced_roles,
)

log = structlog.get_logger(__name__)

BALANCED = (1.0, 4 / 3)
"""Range of the good replies' weight over that of the bad ones (arXiv:2402.01306, eq. 8)."""
ROUNDING = 1e-6
NOT_0 = "the divergence from it would not begin at 0"


@frozen(kw_only=True, eq=False)
class JudgedLabels:
    """Labels with the reference's log-probs, of their own replies and of mismatched ones; `mismatched` is None if the
    loss needs none, and the reference itself for labels that are streamed, and where it moves. `pack` makes a batch of
    them."""

    labels: ExampleSource[Label] | ExampleStream[Label]
    mismatched: dict[Places, float] | LiveReference | None
    pack: Pack[Label] = pack_labels


def make_kto_roles(run: KTORun) -> dict[str, Role]:
    """Returns the processes of the models in a cluster."""
    return make_referenced_roles(run, compared=run.kto.ref_sync_steps is None)


def make_labels(examples: PreparedExamples | ExampleSource[Label]) -> PromptedLabels:
    """Returns the labelled replies of prepared examples, or a caller's own, each with its place."""
    return PreparedLabels(examples) if isinstance(examples, PreparedExamples) else PlacedLabels(examples)


def make_objective(run: KTORun, labels: ExampleSource[Label]) -> UnpairedObjective:
    """Returns the loss, and says where good and bad replies do not weigh about the same.

    Raises:
        DataError: weights are to be balanced, but all replies are of one kind.
    """
    kto = run.kto
    good = _good_replies(labels)
    bad = len(labels) - good
    weights = (kto.desirable_weight, kto.undesirable_weight)
    if kto.balance:
        if not good or not bad:
            raise DataError(
                f"All {len(labels)} replies of data.dataset are {'good' if good else 'bad'}, so that --kto.balance has "
                "nothing to weigh them against: leave it out, or choose other data."
            )
        weights = (max(1.0, bad / good), max(1.0, good / bad))
        log.info("the rarer kind of replies weighs more", desirable_weight=weights[0], undesirable_weight=weights[1])
    elif good and bad and all(weights):
        ratio = weights[0] * good / (weights[1] * bad)
        if not BALANCED[0] - ROUNDING <= ratio <= BALANCED[1] + ROUNDING:
            low, high = (bound * weights[1] * bad / good for bound in BALANCED)
            log.warning(
                f"The {good} good replies weigh {ratio:.3g} times as much as the {bad} bad ones, but KTO's authors "
                f"advise 1 to 1.33 times: set --kto.desirable_weight between {low:.3g} and {high:.3g}, or "
                "--kto.balance."
            )
    else:
        log.warning(f"Of {len(labels)} replies {good} are good: a model learns from good and bad ones together.")
    return UnpairedObjective(loss=kto.loss, beta=kto.beta, desirable_weight=weights[0], undesirable_weight=weights[1])


def _check_mismatch(run: KTORun, labels: ExampleSource[Label], section: str) -> None:
    """Raises `ConfigurationError` if no reply has another's prompt; `section` is that of the data."""
    if run.kto.loss is UnpairedLoss.KTO and len(labels) < 2:
        raise ConfigurationError(
            f"{section}.dataset has one reply alone, but kto puts each reply behind another's prompt: choose other "
            f"data with --{section}.dataset, or raise --{section}.max_samples."
        )


def make_steps(run: KTORun, labels: ExampleSource[Label], total_steps: int) -> list[list[int]]:
    """Returns the indices of the labels of each step that is to come.

    Raises:
        ConfigurationError: a step has one reply alone.
    """
    _check_mismatch(run, labels, "data")
    done, cursor = starting_position(run.ckpt) or (0, PromptCursor(run.train.seed))
    size, batch_size = len(labels), run.train.batch_size
    total = make_total_examples(run.train, labels)
    steps = list(coming_steps(cursor, size, steps=max(0, total_steps - done), batch_size=batch_size, total=total))
    if run.kto.loss is UnpairedLoss.KTO and any(len(indices) < 2 for indices in steps):
        raise ConfigurationError(
            f"The last of {total_steps} steps has one reply alone ({size} replies, train.batch_size {batch_size}), but "
            "kto puts each reply of a step behind another's prompt: change --train.batch_size, or count steps with "
            "--train.max_steps."
        )
    return steps


def check_labels(run: KTORun, examples: PreparedExamples) -> None:
    """Checks what is wrong with the replies for these settings, as the run would before its first step.

    Raises:
        ConfigurationError: a step has one reply alone.
        DataError: weights are to be balanced, but all replies are of one kind.
    """
    labels = make_labels(examples)
    make_objective(run, labels)
    if run.data.stream:
        _check_streamed(examples)
    else:
        make_steps(run, labels, make_total_steps(run.train, labels, run.ckpt))


def _check_streamed(first: Any) -> None:
    """Raises `DataError` if a streamed row is not one label; `first` are examples of the first rows."""
    if isinstance(first, PreparedExamples) and bool((first.branch_counts > 1).any()):
        raise DataError(
            "The rows of data.dataset are pairs, which are two replies each, but a streamed row is one: leave "
            "--data.stream out, or stream rows with prompt, completion and label."
        )


def make_training_labels(
    run: KTORun, labels: PromptedLabels, examples: Any, references: References, steps: Sequence[Sequence[int]]
) -> JudgedLabels:
    """Returns the labels to train on, in these `steps`.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    return _judged(run, labels, examples, references, steps, "data.dataset")


def make_streamed_labels(
    run: KTORun, first: ExampleSource[Label], examples: Any, references: References, preparation: Preparation
) -> JudgedLabels:
    """Returns the labels of rows that are read while training goes on, of which some are the `first`.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    reference = references.live(first, otherwise=NOT_0)
    return JudgedLabels(
        labels=make_stream(preparation, run.train, labelled),
        mismatched=reference if run.kto.loss is UnpairedLoss.KTO else None,
        pack=lambda labels: pack_labels(reference.of(labels)),
    )


def make_labels_of_moving(
    run: KTORun, labels: ExampleSource[Label] | ExampleStream[Label], policy: Callable[[], PolicyModel]
) -> JudgedLabels:
    """Returns labels that are compared, step by step, with a reference that moves toward the policy."""
    reference = make_moving_reference(run, policy, "kto")
    return JudgedLabels(
        labels=labels,
        mismatched=reference if run.kto.loss is UnpairedLoss.KTO else None,
        pack=lambda labels: pack_labels(reference.of(labels)),
    )


def make_held_out_labels(run: KTORun, labels: PromptedLabels, examples: Any, references: References) -> JudgedLabels:
    """Returns the held-out labels, which are measured as one batch."""
    return _judged(run, labels, examples, references, [range(len(labels))], "eval.dataset")


def make_learner(
    run: KTORun, policy: PolicyModel, objective: UnpairedObjective, judged: JudgedLabels, examples: Any
) -> UnpairedLearner:
    """Returns what trains `policy`, or measures it, on labels."""
    return UnpairedLearner(
        policy,
        objective=objective,
        references=judged.mismatched,
        max_tokens=tokens_per_pass(run),
        shares=shares_of_pass(run),
        longest=_longest(examples),
        pack=judged.pack,
    )


class KTOContainer(ReferencedContainer):
    """All objects of a run over labelled replies; `config` is the validated `KTORun`. `kto_container` makes it."""

    labels = providers.Singleton(make_labels, ReferencedContainer.examples)
    eval_labels = providers.Singleton(make_labels, ReferencedContainer.eval_examples)
    coming = providers.Singleton(make_steps, ReferencedContainer.config, labels, ReferencedContainer.total_steps)
    """The labels of each step, by their indices."""
    training = providers.Singleton(
        make_training_labels,
        ReferencedContainer.config,
        labels,
        ReferencedContainer.examples,
        ReferencedContainer.references,
        coming,
    )
    measured = providers.Singleton(
        make_held_out_labels,
        ReferencedContainer.config,
        eval_labels,
        ReferencedContainer.eval_examples,
        ReferencedContainer.references,
    )
    eval_learner = providers.Singleton(
        make_learner,
        ReferencedContainer.config,
        ReferencedContainer.policy,
        ReferencedContainer.objective,
        measured,
        ReferencedContainer.eval_examples,
    )


def kto_container(config: KTORun) -> KTOContainer:
    """Returns the container of a run with these settings."""
    container = KTOContainer(config=config, make=providers.Object(kto_container))
    steps = providers.Callable(_check_streamed, container.examples) if config.data.stream else container.coming
    held_out = providers.Callable(_check_mismatch, config, container.eval_labels, "eval")
    if config.kto.ref_sync_steps is not None:
        labels: providers.Provider[Any] = container.labels
        if config.data.stream:
            labels = providers.Singleton(make_stream, container.preparation, config.train, labelled)
        policy = container.policy.provider
        container.training.override(providers.Singleton(make_labels_of_moving, config, labels, policy))
        container.measured.override(providers.Singleton(make_labels_of_moving, config, container.eval_labels, policy))
        container.average.override(providers.Object(following(config.kto.ref_sync_steps, config.kto.ref_mixup)))
    elif config.data.stream:
        container.training.override(
            providers.Singleton(
                make_streamed_labels,
                config,
                container.labels,
                container.examples,
                container.references,
                container.preparation,
            )
        )
    complete(
        container,
        pack=providers.Object(pack_labels),
        objective=providers.Singleton(make_objective, config, container.labels),
        learned=container.training.provided.labels,
        held_out=container.measured.provided.labels,
        first=providers.List(container.suits, container.objective, steps, if_evaluated(container.config, held_out)),
        learner=providers.Singleton(
            make_learner, config, container.policy, container.objective, container.training, container.examples
        ),
        evaluation=if_evaluated(
            container.config,
            providers.Singleton(ExampleEvaluation, container.eval_learner, container.held_out, container.eval_names),
        ),
        total_steps=providers.Singleton(make_total_steps, config.train, container.labels, config.ckpt),
        roles=providers.Callable(make_kto_roles, config),
        colocated=providers.Object([set(make_kto_roles(config))]),  # it mostly rests while the actor trains
    )
    return container


def _judged(
    run: KTORun,
    labels: PromptedLabels,
    examples: Any,
    references: References,
    steps: Sequence[Sequence[int]],
    setting: str,
) -> JudgedLabels:
    mismatched: dict[Places, float] = {}

    def also(make_reference: Any, store: ScoreStore, **budget: Any) -> None:
        mismatched.update(
            mismatched_references(labels, steps, make_reference, store, longest=longest, name=setting, **budget)
        )

    longest = _longest(examples)
    compares = run.kto.loss is UnpairedLoss.KTO
    judged = references.of(
        labels,
        examples,
        setting=setting,
        otherwise=NOT_0,
        also=also if compares else None,
        mismatched_up_to=longest,
    )
    return JudgedLabels(labels=judged, mismatched=mismatched if compares else None)


def _longest(examples: Any) -> int | None:
    """Returns the length that mismatched replies are cut to, that of the longest example that is allowed."""
    return examples.report.max_tokens if isinstance(examples, PreparedExamples) else None


def _good_replies(labels: ExampleSource[Label]) -> int:
    if isinstance(labels, PreparedLabels):
        return int(labels.examples.labels.sum())
    return sum(labels[index].desirable for index in range(len(labels)))
