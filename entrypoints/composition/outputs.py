"""Makes checkpoints and metric sinks from the settings `ckpt` and `logger`."""

from pathlib import Path
from typing import Any

from attrs import asdict

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.checkpoints.names import METRICS_FILE, SAMPLES_FILE, TRAJECTORIES
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.adapters.tracking.trajectories import ParquetTrajectories
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.entrypoints.redaction import known_secrets, secret_spans, secrets_of_settings


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


def make_trajectories(config: RLConfig, codec: TemplateCodec) -> ParquetTrajectories:
    """Returns the writer of all rollouts, which hides the secrets of the environment, the command and the settings."""
    secrets = known_secrets() | secrets_of_settings(asdict(config))
    return ParquetTrajectories(
        Path(config.ckpt.output_dir) / TRAJECTORIES,
        codec,
        max_gib=config.logger.trajectories_max_gib,
        secrets=lambda text: secret_spans(text, secrets),
    )
