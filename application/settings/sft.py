"""A run of supervised fine-tuning: its sections.

Importable without torch; `rules/sft.py` holds the rules across settings.
"""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.sections.examples import (
    ExampleAdamConfig,
    ExampleDataConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
    with_default_lrs,
)
from rollgrad.domain.settings import BELOW_ONE, COUNT, NOT_NEGATIVE, Condition, own_first, section, setting


class SupervisedLoss(StrEnum):
    """Loss of each token."""

    NLL = "nll"
    """Cross-entropy."""
    DFT = "dft"
    """Cross-entropy weighted by the token's probability, without a gradient through the weight."""


class SupervisedAggregation(StrEnum):
    """Aggregation of the losses of an optimizer step's tokens into one number."""

    TOKEN_MEAN = "token_mean"
    """The mean over all trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """The mean over examples of the mean over their trained tokens."""


WITH_NLL = Condition(lambda here, run: here.loss is SupervisedLoss.NLL, "the loss is not nll", "set --train.loss nll")


@define(kw_only=True, field_transformer=with_default_lrs)
class SupervisedAdamConfig(ExampleAdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    default_lrs = (1e-5, 2e-4)


@define(kw_only=True)
class SupervisedModelConfig(ExampleModelConfig):
    """The model that is fine-tuned, and its optimizer."""

    adam: SupervisedAdamConfig = section(SupervisedAdamConfig, "AdamW.")


@define(kw_only=True)
class SupervisedTrainConfig(ExampleTrainConfig):
    """Optimizer steps from examples, and the loss."""

    batch_tokens: int | None = setting(
        None,
        "Tokens per optimizer step, at most, in place of batch_size: as many examples as have no more together, at "
        "least one.",
        COUNT,
    )
    loss: SupervisedLoss = setting(
        SupervisedLoss.NLL,
        "Loss of each token. nll: cross-entropy. dft: cross-entropy weighted by the token's probability (Wu et al. "
        "2025, arXiv:2508.05629).",
    )
    loss_aggregation: SupervisedAggregation = setting(
        SupervisedAggregation.TOKEN_MEAN,
        "How token losses become one number: token_mean is the mean over all trained tokens of an optimizer step; "
        "sequence_mean the mean over its examples, long or short, of the mean over the trained tokens of each.",
    )
    neftune_alpha: float = setting(
        0.0,
        "Noise on the embeddings in training, uniform in +- this / sqrt(length x embedding size) (Jain et al. 2023, "
        "arXiv:2310.05914; there 5 to 15).",
        NOT_NEGATIVE,
    )
    label_smoothing: float = setting(
        0.0,
        "Weight in the target of the uniform distribution over the vocabulary (Szegedy et al. 2016, arXiv:1512.00567).",
        BELOW_ONE,
        only_if=WITH_NLL,
    )


@define(kw_only=True, field_transformer=own_first)
class SFTRun(OfflineRun):
    """A run of supervised fine-tuning."""

    actor: SupervisedModelConfig = section(SupervisedModelConfig, "The model that is trained.")
    data: ExampleDataConfig = section(ExampleDataConfig, "The examples.")
    train: SupervisedTrainConfig = section(SupervisedTrainConfig, "How examples become optimizer steps.")
