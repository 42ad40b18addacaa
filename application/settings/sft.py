"""A run of supervised fine-tuning: its sections.

Importable without torch; `rules/sft.py` holds the rules across settings.
"""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.sections.actor import ModelConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.ds import DeepSpeedConfig
from rollgrad.application.settings.sections.examples import ExampleDataConfig, ExampleEvalConfig, ExampleTrainConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.optimizer import AdamConfig, LRScheduler
from rollgrad.domain.settings import BELOW_ONE, NOT_NEGATIVE, own_first, section, setting


class SupervisedLoss(StrEnum):
    """Loss of each token."""

    NLL = "nll"
    """Cross-entropy."""
    DFT = "dft"
    """Cross-entropy weighted by the token's probability, without a gradient through the weight."""


LR, LORA_LR = 1e-5, 2e-4
"""Default learning rate of all weights, and of adapters."""


@define(kw_only=True, field_transformer=own_first)
class SupervisedAdamConfig(AdamConfig):
    """AdamW on float32 master weights; biases and norm weights are not decayed."""

    lr: float | None = setting(  # type: ignore[assignment] # a default that depends on lora.rank
        None, "Peak learning rate; default: 1e-5, with adapters (lora.rank above 0) 2e-4.", NOT_NEGATIVE
    )


@define(kw_only=True)
class SupervisedModelConfig(ModelConfig):
    """The model that is fine-tuned, and its optimizer."""

    adam: SupervisedAdamConfig = section(SupervisedAdamConfig, "AdamW.")
    lr_scheduler: LRScheduler = setting(LRScheduler.COSINE_WITH_MIN_LR, "Learning rate after warm-up.")
    lr_warmup_ratio: float = setting(0.03, "Share of the run's optimizer steps spent warming up.", BELOW_ONE)

    @property
    def peak_lr(self) -> float:
        """Learning rate of AdamW after warm-up: by default, adapters have a higher one."""
        default = LORA_LR if self.lora.rank else LR
        return default if self.adam.lr is None else self.adam.lr


@define(kw_only=True)
class SupervisedTrainConfig(ExampleTrainConfig):
    """Optimizer steps from examples, and the loss."""

    loss: SupervisedLoss = setting(
        SupervisedLoss.NLL,
        "nll: cross-entropy, the mean over the trained tokens of an optimizer step. dft: each token's weighted by its "
        "probability (Wu et al. 2025, arXiv:2508.05629).",
    )


@define(kw_only=True)
class SFTRun:
    """A run of supervised fine-tuning."""

    actor: SupervisedModelConfig = section(SupervisedModelConfig, "The model that is trained.")
    data: ExampleDataConfig = section(ExampleDataConfig, "The examples.")
    train: SupervisedTrainConfig = section(SupervisedTrainConfig, "How examples become optimizer steps.")
    eval: ExampleEvalConfig = section(ExampleEvalConfig, "Evaluation.")
    cluster: ClusterConfig = section(ClusterConfig, "Processes of their own for the model, on this machine or many.")
    ds: DeepSpeedConfig = section(DeepSpeedConfig, "How the model is divided over its processes.")
    ckpt: CheckpointConfig = section(CheckpointConfig, "What is written where.")
    logger: LoggerConfig = section(LoggerConfig, "Where metrics go.")
