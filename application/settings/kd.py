"""A run that distils a teacher into a model, on examples: its sections, and the rules across them.

Importable without torch.
"""

from collections.abc import Iterator

from attrs import define

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rules.examples import example_problems, format_problems, shared_problems
from rollgrad.application.settings.sections.examples import (
    DemonstrationDataConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
)
from rollgrad.application.settings.sections.optimizer import AdamConfig
from rollgrad.application.settings.validation import broken_rules
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, own_first, section, setting


@define(kw_only=True)
class TeacherConfig:
    """The frozen model that the student learns from."""

    model_name_or_path: str = setting("", "Model of the teacher, which has the actor's tokens. Required.")


@define(kw_only=True)
class DistillationConfig:
    """The loss: (1 - weight) x cross-entropy + weight x temperature^2 x divergence from the teacher."""

    weight: float = setting(
        0.5,
        "Share of the divergence in the loss; the rest is the cross-entropy of the examples.",
        Range(lambda share: 0 < share <= 1, "greater than 0 and at most 1"),
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
        "Compare the teacher's most likely tokens, so many, and all others as one; default: the whole vocabulary.",
        COUNT,
    )
    cache: bool = setting(
        False,
        "Compute the teacher's predictions once, before the first step, and keep them for later runs: the teacher is "
        "then not in memory while the model trains. With top_k.",
    )


@define(kw_only=True, field_transformer=own_first)
class StudentAdamConfig(AdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    lr: float | None = setting(  # type: ignore[assignment] # a default that depends on lora.rank
        None, "Peak learning rate; default: 1e-5, with adapters (lora.rank above 0) 1e-4.", NOT_NEGATIVE
    )


@define(kw_only=True)
class StudentModelConfig(ExampleModelConfig):
    """The model that is trained, and its optimizer."""

    adam: StudentAdamConfig = section(StudentAdamConfig, "AdamW.")
    lrs = (1e-5, 1e-4)


@define(kw_only=True, field_transformer=own_first)
class KDRun(OfflineRun):
    """A run that distils a teacher into a model."""

    actor: StudentModelConfig = section(StudentModelConfig, "The model that is trained.")
    teacher: TeacherConfig = section(TeacherConfig, "The frozen teacher.")
    kd: DistillationConfig = section(DistillationConfig, "The divergence from the teacher.")
    data: DemonstrationDataConfig = section(DemonstrationDataConfig, "The examples.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How examples become optimizer steps.")


def kd_errors(run: KDRun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a distillation break."""

    def rules(run: KDRun) -> Iterator[Iterator[str]]:
        yield example_problems(run)
        yield format_problems(run.data)
        yield teacher_problems(run)
        yield shared_problems(run)

    return broken_rules(run, rules)


def teacher_problems(run: KDRun) -> Iterator[str]:
    """Yields what is wrong with the teacher and its processes."""
    if not run.teacher.model_name_or_path:
        yield "No teacher is set: name a model with --teacher.model_name_or_path."
    if run.kd.cache and run.kd.top_k is None:
        yield "kd.cache keeps the teacher's most likely tokens, but not how many: set --kd.top_k, such as 64."
    if run.kd.cache and run.cluster.enable:
        yield (
            "kd.cache is set, but in a cluster the teacher is in the actor's processes: leave --kd.cache or "
            "--cluster.enable out."
        )
    if run.cluster.enable:
        for name in ("sequence_parallel_size", "tensor_parallel_size"):
            if getattr(run.ds, name) > 1:
                yield (
                    f"ds.{name} is {getattr(run.ds, name)}, but each process of a distillation has a whole teacher and "
                    f"whole examples: leave --ds.{name} out."
                )
