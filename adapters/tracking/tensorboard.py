"""Metrics for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from rollgrad.domain.errors import MissingExtraError
from rollgrad.domain.ports.metric_sink import MetricSink

NO_TENSORBOARD = "--logger.tensorboard_dir is set, but TensorBoard is not installed: pip install rollgrad[tracking]"
"""The error where it is not installed."""


class TensorBoardSink(MetricSink):
    """Writes each metric as a scalar to an event file in `directory`.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(NO_TENSORBOARD) from error
        self._writer = SummaryWriter(log_dir=str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar for each metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flushes and closes the event file; idempotent."""
        self._writer.close()
