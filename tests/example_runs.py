"""Small runs of trainers over examples: their rows, their settings, an early end; and what any run leaves behind."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from rollgrad.adapters.tracking.trajectory_files import read_trajectories, trajectory_files
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.metric_sink import MetricSink

Run = TypeVar("Run", bound=OfflineRun)


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows as JSONL; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(run: Run, model: Path, data: Path, output: Path, *, lr: float, batch_size: int) -> Run:
    """Returns `run` with these settings: two epochs in float32, and nothing on the console."""
    run.actor.model_name_or_path, run.actor.dtype, run.actor.adam.lr = str(model), DType.FLOAT32, lr
    run.data.dataset = str(data)
    run.train.batch_size, run.train.num_epochs = batch_size, 2
    run.ckpt.output_dir, run.logger.console = str(output), False
    return run


def logged(output: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def rollouts(output: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rollouts of a run by step, with these columns."""
    for path in trajectory_files(output):
        yield from read_trajectories(path, columns).to_pylist()


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the model that a run saved."""
    return load_file(output / "model" / "model.safetensors")


class Stopping(MetricSink):
    """Ends the run, as a full disk would, after some steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._after and "train/loss" in metrics:
            raise CheckpointError("The disk is full.")

    def close(self) -> None:
        """Has nothing to flush."""
