"""A run that learns from replies that are labelled good or bad: its sections, and the rules across them.

Importable without torch.
"""

from collections.abc import Iterator
from enum import StrEnum

from attrs import define

from rollgrad.application.settings.moving_reference import moving_problems
from rollgrad.application.settings.offline import ReferencedRun, reference_problems
from rollgrad.application.settings.rules.examples import example_errors
from rollgrad.application.settings.sections.examples import (
    ExampleAdamConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
    LabelDataConfig,
    RankedReplies,
    with_default_lrs,
)
from rollgrad.domain.algorithms.preference_settings import FollowingSettings
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import NOT_NEGATIVE, POSITIVE, Condition, own_first, section, setting

UNBALANCED = Condition(lambda here, run: not here.balance, "kto.balance sets it by the data", "leave --{at}balance out")


class UnpairedLoss(StrEnum):
    """Loss of a labelled reply."""

    KTO = "kto"
    """Compared with the distance from the reference."""
    APO_ZERO = "apo_zero_unpaired"
    """Compared with 0."""


@define(kw_only=True, field_transformer=own_first)
class KTOSettings(FollowingSettings):
    """The loss of labelled replies."""

    loss: UnpairedLoss = setting(
        UnpairedLoss.KTO,
        "kto: 1 - sigmoid(beta (r - z)) of a good reply and 1 - sigmoid(beta (z - r)) of a bad one (Ethayarajh et al. "
        "2024, arXiv:2402.01306). r is the reply's log-ratio; z, at least 0, is the mean of r over the step's prompts "
        "with other prompts' replies. apo_zero_unpaired: z is 0, for good replies better than the model's.",
    )
    beta: float = setting(0.1, "Scale of the log-ratios against the reference.", POSITIVE)
    desirable_weight: float = setting(1.0, "Weight of the loss of good replies.", NOT_NEGATIVE, only_if=UNBALANCED)
    undesirable_weight: float = setting(1.0, "Weight of the loss of bad replies.", NOT_NEGATIVE, only_if=UNBALANCED)
    balance: bool = setting(
        False,
        "Raise the weight of the rarer kind of replies, so that good and bad ones weigh the same over the data.",
    )


@define(kw_only=True, field_transformer=with_default_lrs)
class UnpairedAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (1e-6, 1e-5)


@define(kw_only=True)
class UnpairedModelConfig(ExampleModelConfig):
    """The model that is trained, and its optimizer."""

    adam: UnpairedAdamConfig = section(UnpairedAdamConfig, "AdamW.")


@define(kw_only=True, field_transformer=own_first)
class KTORun(ReferencedRun):
    """A run that learns from replies that are labelled good or bad."""

    actor: UnpairedModelConfig = section(UnpairedModelConfig, "The model that is trained.")
    kto: KTOSettings = section(KTOSettings, "The loss of labelled replies.")
    data: LabelDataConfig = section(LabelDataConfig, "The labelled replies.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How replies become optimizer steps.")

    def evaluated(self) -> tuple[str, ...]:
        """Returns the metrics of `UnpairedObjective`."""
        kinds = ("desirable", "undesirable")
        of_labels = (f"{label}_{what}" for what in ("share", "reward", "logprob") for label in kinds)
        return "loss", "accuracy", "kl", "entropy", *of_labels


def kto_errors(run: KTORun) -> list[ConfigurationError]:
    """Returns every rule that the settings of a run over labelled replies break."""
    return example_errors(run, loss_problems, reference_problems)


def loss_problems(run: KTORun) -> Iterator[str]:
    """Yields what is wrong with the loss."""
    kto = run.kto
    if run.data.pairs is RankedReplies.ALL:
        yield (
            "data.pairs is all, but a reply of all pairs would be good in one and bad in another: leave --data.pairs "
            "out."
        )
    if kto.balance and run.data.stream:
        yield (
            "kto.balance counts all good and bad replies, but data.stream has no end of them: leave --kto.balance or "
            "--data.stream out, or set --kto.desirable_weight and --kto.undesirable_weight."
        )
    if kto.loss is UnpairedLoss.KTO and run.train.batch_size < 2:
        yield (
            f"train.batch_size is {run.train.batch_size}, but kto puts each reply of a step behind another's prompt: "
            "set --train.batch_size to 2 or more, or --kto.loss apo_zero_unpaired."
        )
    if kto.ref_sync_steps is not None:
        yield from moving_problems(run, "kto", kto.ref_sync_steps)
        if run.ckpt.best_metric is not None:
            yield (
                f"kto.ref_sync_steps is {kto.ref_sync_steps}, but ckpt.best_metric is {run.ckpt.best_metric!r}, which "
                "compares with the reference, and that is another one at each evaluation: leave --kto.ref_sync_steps "
                "or --ckpt.best_metric out."
            )
    if not kto.desirable_weight and not kto.undesirable_weight:
        yield (
            "kto.desirable_weight and kto.undesirable_weight are both 0, so that nothing is learned: raise "
            "--kto.desirable_weight or --kto.undesirable_weight."
        )
