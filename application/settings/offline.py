"""The sections that runs over examples have in common.

Importable without torch.
"""

from attrs import define

from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.ds import DeepSpeedConfig
from rollgrad.application.settings.sections.examples import (
    ExampleEvalConfig,
    ExampleModelConfig,
    ExampleTrainConfig,
    RowsConfig,
)
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.domain.settings import section


@define(kw_only=True)
class OfflineRun:
    """A run that learns from examples."""

    actor: ExampleModelConfig = section(ExampleModelConfig, "The model that is trained.")
    data: RowsConfig = section(RowsConfig, "The examples.")
    train: ExampleTrainConfig = section(ExampleTrainConfig, "How examples become optimizer steps.")
    eval: ExampleEvalConfig = section(ExampleEvalConfig, "Evaluation.")
    cluster: ClusterConfig = section(ClusterConfig, "Processes of their own for the models, on this machine or many.")
    ds: DeepSpeedConfig = section(DeepSpeedConfig, "How models are divided over their processes.")
    ckpt: CheckpointConfig = section(CheckpointConfig, "What is written where.")
    logger: LoggerConfig = section(LoggerConfig, "Where metrics go.")
