"""The composition root of `rollgrad train kd`."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor, sees_images
from rollgrad.adapters.checkpoints.fingerprint import model_fingerprint
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.streaming import StreamedExamples, demonstration
from rollgrad.adapters.engines.vllm_server.teacher import ServedTeacher
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, KeptTeacher, Teacher
from rollgrad.adapters.models.torch.loading.loading import (
    default_device,
    load_tokenizer,
    load_vocabulary_size,
    refuse_classifier,
    resolve_dtype,
)
from rollgrad.adapters.models.torch.references import TorchTeacher
from rollgrad.application.learning.examples import together
from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.teacher import Datasources, asked, unpacked_predictions, with_teacher
from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass
from rollgrad.application.settings.kd import DistillationConfig, KDRun
from rollgrad.domain.algorithms.losses.distillation import DistillationObjective, SpanObjective
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, TeacherModel
from rollgrad.domain.ports.score_store import ScoreStore
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.models import make_actor_model
from rollgrad.entrypoints.composition.offline.container import OfflineContainer, complete
from rollgrad.entrypoints.composition.offline.kd_spans import TEACHER_FLAG, make_spans
from rollgrad.entrypoints.composition.offline.preparation import (
    Preparation,
    check_positions,
    make_stream,
    reference_directory,
)
from rollgrad.entrypoints.composition.offline.reference import START_TOLERANCE, reference_key
from rollgrad.entrypoints.composition.served import (
    check_datasources,
    check_same_weights,
    make_served,
    served_fingerprint,
)
from rollgrad.entrypoints.composition.vocabulary import check_vocabulary
from rollgrad.entrypoints.run_directory import continues

log = structlog.get_logger(__name__)

HELD_OUT = "eval.dataset"
CHECKED = 4
"""Examples by which a model is compared with itself."""


def distillation_settings(kd: DistillationConfig) -> DistillationSettings:
    """Returns what the divergence is computed with."""
    return DistillationSettings(beta=kd.beta, temperature=kd.temperature, top_k=kd.top_k)


def check_teacher(run: KDRun, tokenizer: Any) -> None:
    """Checks that the teacher writes texts, and has the vocabulary of `tokenizer`, and positions for the longest
    example allowed.

    Raises:
        CheckpointError: it judges texts, or has no tokenizer.
        ConfigurationError: it has another vocabulary, or fewer positions.
    """
    name = run.teacher.model_name_or_path
    if not name:
        return  # servers name their models, and are asked for some tokens
    refuse_classifier(name, TEACHER_FLAG)
    its = load_tokenizer(name, flag=TEACHER_FLAG)
    if run.kd.spans:
        return  # any tokens, and examples that are too long for it are left out
    check_vocabulary(its, tokenizer, name, flag=TEACHER_FLAG, otherwise=", or compare spans of text: --kd.spans")
    check_positions("teacher", name, run)


def make_teacher(run: KDRun, tokenizer: Any, images: ImageRenderer | None = None) -> Teacher:
    """Loads the teacher, in the actor's format; `images` renders the images that it sees.

    Raises:
        ConfigurationError: it has another vocabulary, or fewer positions than examples may have tokens, or does not see
            images as the actor does.
    """
    name = run.teacher.model_name_or_path
    check_teacher(run, tokenizer)
    warn_of_bias(run)
    if images is not None:
        check_sight(name, tokenizer, images)
    return Teacher(make_actor_model(run.actor, name, TEACHER_FLAG, images=images), distillation_settings(run.kd))


def check_sight(name: str, tokenizer: Any, images: ImageRenderer) -> None:
    """Checks that the teacher's processor makes of images what `images`, the actor's, does.

    Raises:
        ConfigurationError: it makes something else of them, or the teacher sees none.
    """
    sees = sees_images(name)
    if not sees or ImageRenderer(load_processor(name, tokenizer, flag=TEACHER_FLAG)).settings != images.settings:
        raise ConfigurationError(
            f"The teacher {name!r} does not see images by the actor's processor: set {TEACHER_FLAG} to a model of the "
            "actor's family, or leave out --data.image_key."
        )


def warn_of_bias(run: KDRun) -> None:
    """Warns of a divergence that the teacher's most likely tokens do not show."""
    if run.kd.beta > 0 and run.kd.top_k is not None:
        log.warning(
            f"kd.beta {run.kd.beta:g} weighs what the student thinks likely, of which --kd.top_k {run.kd.top_k} shows "
            "only the teacher's most likely tokens: the gradient is biased."
        )


def make_taught(
    run: KDRun,
    examples: PreparedExamples | ExampleSource[Demonstration],
    tokenizer: Any,
    images: ImageRenderer | None,
    setting: str,
) -> ExampleSource[Demonstration]:
    """Returns the examples, with the teacher's predictions if those are kept; `setting` names the data.

    Raises:
        ConfigurationError: as `make_teacher`, `make_served`, `datasources_of` and `check_kept`.
    """
    if run.kd.spans:
        return make_spans(run, examples, tokenizer, setting)
    if not run.kd.cache:
        return examples
    data = examples.fingerprint if isinstance(examples, PreparedExamples) else None
    size = load_vocabulary_size(run.actor.model_name_or_path)
    depends: dict[str, Any] = {"teacher": run.kd.top_k, "temperature": run.kd.temperature, "vocabulary": size}
    budget = tokens_per_pass(run)
    if not run.teacher.served:
        its = model_fingerprint(run.teacher.model_name_or_path, whole=True)
        key = reference_key(run, its, data, **depends)
        store = ScoreFiles(None if key is None else reference_directory(run.data))
        local = partial(make_predicting_teacher, run, tokenizer, size, images)
        return with_teacher(examples, local, store, key=str(key), max_tokens=budget, name=setting)
    datasources = datasources_of(run, examples, setting)
    if datasources is not None:
        depends["datasources"] = hashlib.sha256(json.dumps([*datasources.values()]).encode()).hexdigest()
    served = make_served(run.teacher, run.actor.model_name_or_path, tokenizer)
    key = reference_key(run, served_fingerprint(served), data, **depends)
    store = ScoreFiles(None if key is None else reference_directory(run.data))
    assert run.kd.top_k is not None
    teacher = ServedTeacher(served.reference, top_k=run.kd.top_k)
    check_kept(store, str(key), examples, teacher, datasources)

    def checked_teacher() -> TeacherModel:
        check_teacher(run, tokenizer)
        warn_of_bias(run)
        return teacher

    return with_teacher(
        examples, checked_teacher, store, key=str(key), max_tokens=budget, name=setting, datasources=datasources
    )


def make_predicting_teacher(run: KDRun, tokenizer: Any, size: int, images: ImageRenderer | None) -> TeacherModel:
    """Returns the teacher in this process whose predictions are kept; `size` is the vocabulary's. Else as
    `make_teacher`."""
    return TorchTeacher(make_teacher(run, tokenizer, images), size)


def datasources_of(
    run: KDRun, examples: PreparedExamples | ExampleSource[Demonstration], setting: str
) -> Datasources | None:
    """Returns the datasources of examples, by which their teachers are found; None where one teaches all.

    Raises:
        ConfigurationError: one has no teacher, a teacher has none, or they are not known.
    """
    if run.teacher.urls is None:
        return None
    if not isinstance(examples, PreparedExamples) or not (names := examples.datasources()):
        raise ConfigurationError(
            f"--teacher.urls finds teachers by the datasource of rows, but the examples of {setting} are the caller's "
            "own, which have none: set --teacher.url to one server instead."
        )
    found = {row: names[row] for row in examples.rows.tolist()}
    check_datasources(run.teacher, {*found.values()}, setting, held_out=setting == HELD_OUT)
    return found


def check_kept(
    store: ScoreStore,
    key: str,
    examples: ExampleSource[Demonstration],
    teacher: TeacherModel,
    datasources: Datasources | None = None,
) -> None:
    """Compares what was kept of servers' predictions with what they predict now, by the first example, of `datasources`
    of which each has a teacher by the first one of each.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    kept = store.load(key)
    firsts = dict[str, int]()
    for index, name in zip(range(len(kept)), [""] if datasources is None else datasources.values(), strict=False):
        firsts.setdefault(name, index)
    for name, index in firsts.items():
        before = unpacked_predictions(kept[index]).logprobs_AB[:, 0].float()
        now = teacher.predict(asked([examples[index]], datasources)).logprobs_AB[:, 0].float()
        differ = float((now - before).abs().mean()) if len(now) == len(before) else float("inf")
        check_same_weights(differ, f"--teacher.urls for {name!r}" if name else "--teacher.url")


def make_policy_teacher(run: KDRun, tokenizer: Any, images: ImageRenderer | None) -> Teacher | KeptTeacher | None:
    """Returns what the policy's distributions are compared with: the teacher itself, or its predictions; None where
    spans are compared."""
    if run.kd.spans:
        return None
    return KeptTeacher(distillation_settings(run.kd)) if run.kd.cache else make_teacher(run, tokenizer, images)


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
    parts = split(batch, tokens_per_pass(run), shares_of_pass(run), padded=policy().padded())
    objective = make_objective(run.kd)
    found = together([objective(policy().score(part), part).metrics for part in parts])["divergence"]
    tolerance = START_TOLERANCE[resolve_dtype(run.actor.dtype, default_device())]
    if not abs(found) <= tolerance:
        raise ConfigurationError(
            f"The model is its own teacher, but they differ by {found:.3g} nats a token (rounding makes up to "
            f"{tolerance:g}). Usual causes: another number format or kernel (--actor.dtype), or dropout is on."
        )
    return examples


def make_objective(kd: DistillationConfig) -> DistillationObjective | SpanObjective:
    """Returns the loss of a run."""
    if kd.spans:
        return SpanObjective(weight=kd.weight, beta=kd.beta, temperature=kd.temperature)
    return DistillationObjective(weight=kd.weight, temperature=kd.temperature)


def make_checked_stream(
    run: KDRun,
    first: ExampleSource[Demonstration],
    policy: Callable[[], PolicyModel],
    preparation: Preparation,
) -> StreamedExamples[Demonstration]:
    """Returns the examples of rows that are read while training goes on; raises as `checked`, by the `first` ones."""
    checked(run, first, policy)
    return make_stream(preparation, run.train, demonstration)


def kd_container(config: KDRun) -> OfflineContainer:
    """Returns the container of a run with these settings."""
    container = OfflineContainer(config=config, make=providers.Object(kd_container))
    renders = (container.tokenizer, container.image_renderer)
    taught = providers.Callable(make_taught, config, container.examples, *renders, "data.dataset")
    learned: providers.Provider[Any] = providers.Singleton(checked, config, taught, container.policy.provider)
    if config.data.stream:
        learned = providers.Singleton(
            make_checked_stream, config, taught, container.policy.provider, container.preparation
        )
    complete(
        container,
        pack=providers.Object(pack_demonstrations),
        objective=providers.Singleton(make_objective, config.kd),
        correct=providers.Object(config.kd.spans),  # columns of a teacher have it
        teacher=providers.Singleton(make_policy_teacher, config, *renders),
        first=providers.Callable(check_teacher, config, container.tokenizer),
        learned=learned,
        held_out=providers.Singleton(make_taught, config, container.eval_examples, *renders, HELD_OUT),
    )
    return container
