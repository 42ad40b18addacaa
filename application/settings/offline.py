"""The sections that runs over examples have in common.

Importable without torch.
"""

from collections.abc import Iterator

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
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.domain.settings import section

TOKEN_METRICS = ("loss", "nll", "accuracy", "entropy")
"""Metrics of `SupervisedObjective` that need no tokenizer, with its loss."""


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

    def evaluated(self) -> tuple[str, ...]:
        """Returns the names of all metrics that an evaluation may have, without `eval/`: those of supervised
        fine-tuning, which other trainers replace."""
        return *TOKEN_METRICS, "bits_per_byte"


@define(kw_only=True)
class ReferencedRun(OfflineRun):
    """A run that compares the model with a frozen reference, whose log-probs are computed before training begins."""

    ref: RefConfig = section(RefConfig, "The frozen reference.")


def reference_problems(run: ReferencedRun) -> Iterator[str]:
    """Yields what is wrong with the processes of the reference."""
    if run.cluster.enable and (run.ref.num_nodes, run.ref.num_gpus_per_node) != (None, None):
        yield (
            "ref.num_nodes or ref.num_gpus_per_node is set, but the reference is in the actor's processes, before "
            "training begins: leave --ref.num_nodes and --ref.num_gpus_per_node out."
        )
