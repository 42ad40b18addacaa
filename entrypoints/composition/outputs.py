"""Makes checkpoints and metric sinks from the settings `ckpt` and `logger`."""

from pathlib import Path
from typing import Any

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.checkpoints.names import METRICS_FILE, SAMPLES_FILE
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.logger import LoggerConfig


def make_checkpoints(ckpt: CheckpointConfig) -> LocalCheckpointStore:
    """Returns the store of models and training states."""
    return LocalCheckpointStore(
        Path(ckpt.output_dir),
        None if ckpt.state_dir is None else Path(ckpt.state_dir),
        keep_states=ckpt.keep_states,
        keep_models=ckpt.keep_models,
    )


def make_sinks(ckpt: CheckpointConfig, logger: LoggerConfig, steps: int) -> MultiSink:
    """Returns the sinks of the metrics of `steps` steps."""
    sinks: list[Any] = [JsonlSink(Path(ckpt.output_dir) / METRICS_FILE)]
    if logger.console:
        sinks.append(ConsoleSink(steps))
    if logger.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(Path(logger.tensorboard_dir)))
    return MultiSink(sinks)


def make_sample_log(ckpt: CheckpointConfig, logger: LoggerConfig, codec: TemplateCodec) -> SampleWriter:
    """Returns the writer of sampled texts."""
    return SampleWriter(Path(ckpt.output_dir) / SAMPLES_FILE, codec.decode, logger.log_samples)
