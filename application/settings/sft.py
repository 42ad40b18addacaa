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
from rollgrad.domain.settings import BELOW_ONE, section, setting


class SupervisedLoss(StrEnum):
    """Loss of each token."""

    NLL = "nll"
    """Cross-entropy."""
    DFT = "dft"
    """Cross-entropy weighted by the token's probability, without a gradient through the weight."""


@define(kw_only=True)
class SupervisedModelConfig(ModelConfig):
    """The model that is fine-tuned, and its optimizer."""

    adam: AdamConfig = section(
        lambda: AdamConfig(lr=1e-5), "AdamW. Adapters (lora.rank above 0) want about ten times the learning rate."
    )
    lr_scheduler: LRScheduler = setting(LRScheduler.COSINE_WITH_MIN_LR, "Learning rate after warm-up.")
    lr_warmup_ratio: float = setting(0.03, "Share of the run's optimizer steps spent warming up.", BELOW_ONE)


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
