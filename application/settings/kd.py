"""A run that distils a teacher into a model, on examples: its sections, and the rules across them.

Importable without torch.
"""

from collections.abc import Iterator

from attrs import define

from rollgrad.application.settings.offline import TOKEN_METRICS, OfflineRun
from rollgrad.application.settings.rules.examples import example_errors, format_problems
from rollgrad.application.settings.sections.examples import (
    ExampleAdamConfig,
    ExampleDataConfig,
    ExampleFormat,
    ExampleModelConfig,
    ExampleTrainConfig,
    with_default_lrs,
)
from rollgrad.application.settings.sections.ref import served_problems
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import COUNT, POSITIVE, SHARE, SOME_SHARE, own_first, section, setting


@define(kw_only=True)
class TeacherConfig:
    """The frozen model that the student learns from."""

    model_name_or_path: str = setting(
        "", "Model of the teacher, which has the actor's tokens unless kd.spans is on. Required without urls."
    )
    url: str | None = setting(
        None,
        "Address of a server that has this model, http://host:8000, such as `vllm serve`. It is asked for its "
        "predictions once, with kd.cache or kd.spans. Of the model's files only tokenizer and configuration are read. "
        "The environment variable ROLLGRAD_ENGINE_TOKEN is sent as a bearer token.",
    )
    urls: dict[str, str] | None = setting(
        None,
        "Addresses of servers, each with the teacher for the examples of one datasource, asked as url is: "
        "--teacher.urls math http://one:8000 code http://two:8000. Examples of other datasources have url's. Where a "
        "server has several models, MODEL@http://two:8000 names one.",
    )

    @property
    def served(self) -> bool:
        """Whether servers have it."""
        return self.url is not None or self.urls is not None


@define(kw_only=True)
class DistillationConfig:
    """The loss: (1 - weight) x cross-entropy + weight x temperature^2 x divergence from the teacher."""

    weight: float = setting(
        0.5,
        "Share of the divergence in the loss; the rest is the cross-entropy of the examples.",
        SOME_SHARE,
    )
    beta: float = setting(
        0.0,
        "Divergence: 0 is the forward KL(teacher || student), 1 the reverse KL(student || teacher), between them is "
        "the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649).",
        SHARE,
    )
    temperature: float = setting(1.0, "Temperature of both distributions in the divergence.", POSITIVE)
    top_k: int | None = setting(
        None,
        "Compare so many of the teacher's most likely tokens, and all others as one; default: the whole vocabulary.",
        COUNT,
    )
    cache: bool = setting(
        False,
        "Compute the teacher's predictions once, before the first step, and keep them for later runs: the teacher is "
        "then not in memory while the model trains. With top_k.",
    )
    spans: bool = setting(
        False,
        "Compare how likely spans of text are rather than tokens, so that the teacher may have other tokens "
        "(approximate likelihood matching, arXiv:2503.20083). The teacher's probabilities are computed once, before "
        "the first step, and kept for later runs. The loss has temperature in the place of temperature^2.",
    )


@define(kw_only=True, field_transformer=with_default_lrs)
class StudentAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (1e-5, 1e-4)


@define(kw_only=True)
class StudentModelConfig(ExampleModelConfig):
    """The model that is trained, and its optimizer."""

    adam: StudentAdamConfig = section(StudentAdamConfig, "AdamW.")


@define(kw_only=True, field_transformer=own_first)
class KDRun(OfflineRun):
    """A run that distils a teacher into a model."""

    actor: StudentModelConfig = section(StudentModelConfig, "The model that is trained.")
    teacher: TeacherConfig = section(TeacherConfig, "The frozen teacher.")
    kd: DistillationConfig = section(DistillationConfig, "The divergence from the teacher.")
    data: ExampleDataConfig = section(ExampleDataConfig, "The examples.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How examples become optimizer steps.")

    def evaluated(self) -> tuple[str, ...]:
        """Returns the metrics of `DistillationObjective`."""
        return *TOKEN_METRICS, "divergence"


def kd_errors(run: KDRun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a distillation break."""
    return example_errors(run, lambda run: format_problems(run.data), teacher_problems)


def teacher_problems(run: KDRun) -> Iterator[str]:
    """Yields what is wrong with the teacher and its processes."""
    if not run.teacher.model_name_or_path and (run.teacher.urls is None or run.teacher.url is not None):
        yield "No teacher is set: name a model with --teacher.model_name_or_path."
    if run.kd.spans:
        yield from _span_problems(run)
        return
    if run.kd.cache and run.kd.top_k is None:
        yield "kd.cache keeps the teacher's most likely tokens, but not how many: set --kd.top_k, such as 64."
    if run.kd.cache and run.data.stream:
        yield (
            "kd.cache keeps predictions of all examples, but data.stream has no end of them: leave --kd.cache or "
            "--data.stream out."
        )
    if run.teacher.served:
        yield from _served_teacher_problems(run)
    elif run.kd.cache and run.cluster.enable:
        yield (
            "kd.cache is set, but in a cluster the teacher is in the actor's processes: leave --kd.cache or "
            "--cluster.enable out."
        )


def _span_problems(run: KDRun) -> Iterator[str]:
    """Yields what does not go together with spans, of which the teacher says how likely each is before the first
    step."""
    for given, flag, why in (
        (run.kd.top_k is not None, "kd.top_k", "compares no single tokens"),
        (run.kd.cache, "kd.cache", "always keeps what the teacher says, a number a token"),
        (run.teacher.urls is not None, "teacher.urls", "has one teacher for all rows"),
        (run.data.stream, "data.stream", "asks the teacher of all examples before the first step"),
        (run.data.image_key is not None, "data.image_key", "compares text alone"),
        (
            run.data.format in (ExampleFormat.TOKENS, ExampleFormat.REPLIES),
            "data.format",
            "has each model read the rows by its own tokenizer, and these are tokens of one",
        ),
    ):
        if given:
            yield f"kd.spans {why}: leave --{flag} or --kd.spans out."
    yield from served_problems("teacher", run.teacher.url, None)
    if run.cluster.enable and run.teacher.url is None:
        yield (
            "kd.spans has the teacher in this process, not in those of a cluster: leave --cluster.enable out, or have "
            "a server of the teacher, --teacher.url."
        )


def _served_teacher_problems(run: KDRun) -> Iterator[str]:
    flag = "teacher.url" if run.teacher.urls is None else "teacher.urls"
    yield from served_problems("teacher", run.teacher.url, run.teacher.urls)
    if not run.kd.cache:
        yield (
            f"{flag} is set, but a server tells its most likely tokens once, before the first step: add --kd.cache "
            f"and --kd.top_k, or leave --{flag} out."
        )
    if run.data.image_key is not None:
        yield (
            f"{flag} is set and data.image_key is {run.data.image_key!r}, but a server is sent no images: leave "
            f"--{flag} out, so that the teacher is in this process."
        )
    if run.kd.temperature != 1:
        yield (
            f"kd.temperature is {run.kd.temperature:g}, but of a server's most likely tokens only the probabilities at "
            f"temperature 1 are known: leave --kd.temperature or --{flag} out."
        )
