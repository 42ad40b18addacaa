"""The composition root of `rollgrad train kd`."""

from collections.abc import Callable
from typing import Any

import structlog
from dependency_injector import providers

from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.data.examples.preparation import PreparedExamples
from rollgrad.adapters.models.torch.distillation import DistillationSettings, KeptTeacher, Teacher
from rollgrad.adapters.models.torch.loading import (
    default_device,
    load_positions,
    load_tokenizer,
    load_vocabulary_size,
    resolve_dtype,
)
from rollgrad.adapters.models.torch.models import TorchTeacher
from rollgrad.application.learning.examples import together
from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.teacher import with_teacher
from rollgrad.application.settings.kd import DistillationConfig, KDRun
from rollgrad.domain.algorithms.losses.distillation import DistillationObjective
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.entrypoints.composition.examples import make_total_steps, reference_directory
from rollgrad.entrypoints.composition.models import make_actor_model
from rollgrad.entrypoints.composition.offline import OfflineContainer, make_roles, shares_of_pass, tokens_per_pass
from rollgrad.entrypoints.composition.reference import START_TOLERANCE, reference_key
from rollgrad.entrypoints.run_directory import continues

log = structlog.get_logger(__name__)

TEACHER_FLAG = "--teacher.model_name_or_path"
CHECKED = 4
"""Examples by which a model is compared with itself."""


def check_vocabulary(teacher: Any, student: Any, name: str) -> None:
    """Checks that a token means the same to both tokenizers.

    Raises:
        ConfigurationError: their vocabularies differ.
    """
    its, own = teacher.get_vocab(), student.get_vocab()
    if its == own:
        return
    differing = sorted(token for token in its.keys() | own.keys() if its.get(token) != own.get(token))
    example = differing[0]
    raise ConfigurationError(
        f"The teacher {name!r} has another vocabulary than the actor: {len(differing)} tokens differ, such as "
        f"{example!r} (token {its.get(example, 'none')} of the teacher, {own.get(example, 'none')} of the actor), so "
        f"that their predictions cannot be compared: set {TEACHER_FLAG} to a model with the actor's tokenizer."
    )


def distillation_settings(kd: DistillationConfig) -> DistillationSettings:
    """Returns what the divergence is computed with."""
    return DistillationSettings(beta=kd.beta, temperature=kd.temperature, top_k=kd.top_k)


def check_teacher(run: KDRun, tokenizer: Any) -> None:
    """Checks that the teacher has the vocabulary of `tokenizer`, and positions for the longest example allowed.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigurationError: it has another vocabulary, or fewer positions.
    """
    name = run.teacher.model_name_or_path
    check_vocabulary(load_tokenizer(name, flag=TEACHER_FLAG), tokenizer, name)
    positions, own = load_positions(name), load_positions(run.actor.model_name_or_path)
    longest = run.data.max_tokens if own is None else min(own, run.data.max_tokens)
    if positions is not None and positions < longest:
        raise ConfigurationError(
            f"The teacher {name!r} has {positions} positions, but examples may have {longest} tokens, of which it "
            f"would predict the last ones badly: set --data.max_tokens {positions}."
        )


def make_teacher(run: KDRun, tokenizer: Any) -> Teacher:
    """Loads the teacher, in the actor's format.

    Raises:
        ConfigurationError: it has another vocabulary, or fewer positions than examples may have tokens.
    """
    name = run.teacher.model_name_or_path
    check_teacher(run, tokenizer)
    if run.kd.beta > 0 and run.kd.top_k is not None:
        log.warning(
            f"kd.beta {run.kd.beta:g} weighs what the student thinks likely, of which --kd.top_k {run.kd.top_k} shows "
            "only the teacher's most likely tokens: the gradient is biased."
        )
    return Teacher(make_actor_model(run.actor, name, TEACHER_FLAG), distillation_settings(run.kd))


def make_taught(
    run: KDRun, examples: PreparedExamples | ExampleSource[Demonstration], tokenizer: Any, setting: str
) -> ExampleSource[Demonstration]:
    """Returns the examples, with the teacher's predictions if those are kept; `setting` names the data."""
    if not run.kd.cache:
        return examples
    data = examples.fingerprint if isinstance(examples, PreparedExamples) else None
    its = model_fingerprint(run.teacher.model_name_or_path, whole=True)
    size = load_vocabulary_size(run.actor.model_name_or_path)
    key = reference_key(run, its, data, teacher=run.kd.top_k, temperature=run.kd.temperature, vocabulary=size)
    return with_teacher(
        examples,
        lambda: TorchTeacher(make_teacher(run, tokenizer), size),
        ScoreFiles(None if key is None else reference_directory(run.data)),
        key=str(key),
        max_tokens=tokens_per_pass(run),
        name=setting,
    )


def make_policy_teacher(run: KDRun, tokenizer: Any) -> Teacher | KeptTeacher:
    """Returns what the policy is compared with: the teacher itself, or its predictions."""
    return KeptTeacher(distillation_settings(run.kd)) if run.kd.cache else make_teacher(run, tokenizer)


def checked(
    run: KDRun, examples: ExampleSource[Demonstration], policy: Callable[[], PolicyModel]
) -> ExampleSource[Demonstration]:
    """Returns the examples. A model that is its own teacher is compared with it first.

    Raises:
        ConfigurationError: it does not predict what it predicts as a teacher.
    """
    itself = run.teacher.model_name_or_path == run.actor.model_name_or_path and not run.actor.lora.load_in_4bit
    if not itself or continues(run.ckpt):
        return examples
    batch = pack_demonstrations([examples[index] for index in range(min(CHECKED, len(examples)))])
    parts = split(batch, tokens_per_pass(run), shares_of_pass(run))
    found = together([DistillationObjective()(policy().score(part), part).metrics for part in parts])["divergence"]
    tolerance = START_TOLERANCE[resolve_dtype(run.actor.dtype, default_device())]
    if not abs(found) <= tolerance:
        raise ConfigurationError(
            f"The model is its own teacher, but they differ by {found:.3g} nats a token (rounding makes up to "
            f"{tolerance:g}). Usual causes: another number format or kernel (--actor.dtype), or dropout is on."
        )
    return examples


def kd_container(config: KDRun) -> OfflineContainer:
    """Returns the container of a run with these settings."""
    container = OfflineContainer(config=config, make=providers.Object(kd_container))
    container.override_providers(
        pack=providers.Object(pack_demonstrations),
        objective=providers.Singleton(
            DistillationObjective, weight=config.kd.weight, temperature=config.kd.temperature
        ),
        teacher=providers.Singleton(make_policy_teacher, config, container.tokenizer),
        learned=providers.Singleton(
            checked,
            config,
            providers.Callable(make_taught, config, container.examples, container.tokenizer, "data.dataset"),
            container.policy.provider,
        ),
        held_out=providers.Singleton(make_taught, config, container.eval_examples, container.tokenizer, "eval.dataset"),
        total_steps=providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt),
        actor_steps=container.total_steps,  # a process of a cluster is told the number, and prepares no data
        roles=providers.Callable(make_roles, config),
    )
    return container
