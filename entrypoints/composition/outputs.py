"""Makes checkpoints and metric sinks from the settings `ckpt` and `logger`."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import asdict

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import METRICS_FILE, PROFILE, SAMPLES_FILE, TRAJECTORIES
from rollgrad.adapters.system.profile import StepProfiler
from rollgrad.adapters.system.python_file import load_python
from rollgrad.adapters.tracking.background import BackgroundSink
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.samples import ReplyWriter, SampleWriter
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.adapters.tracking.trajectories import ParquetTrajectories, make_room
from rollgrad.adapters.tracking.trajectory_table import Spans
from rollgrad.application.pipelines.step_callback import StepCallback
from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.logger import is_own_tracker
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.profiled import Profiled
from rollgrad.domain.ports.run_tracker import RunTracker
from rollgrad.entrypoints.description import public_settings
from rollgrad.entrypoints.redaction import known_secrets, secret_spans, secrets_of_settings

SINKS: Mapping[str, str] = {
    "wandb": "WandbSink",
    "trackio": "TrackioSink",
    "mlflow": "MLflowSink",
    "swanlab": "SwanLabSink",
}
"""Classes of the trackers' sinks, each in the module of `adapters/tracking/` with the tracker's name."""


Tracker = Callable[[TrackedRun], RunTracker]
"""A tracker's class, which is made of the run."""
TRACKS = ("log", "samples", "fail", "close")
"""Methods of a tracker."""


def make_checkpoints(ckpt: CheckpointConfig) -> LocalCheckpointStore:
    """Returns the store of models and training states."""
    return LocalCheckpointStore(
        Path(ckpt.output_dir),
        None if ckpt.state_dir is None else Path(ckpt.state_dir),
        keep_states=ckpt.keep_states,
        keep_models=ckpt.keep_models,
        keep_models_gib=ckpt.keep_models_gib,
        spare=partial(make_room, Path(ckpt.output_dir)),
    )


def load_on_step(path: str | None) -> Callable[..., Any] | None:
    """Returns the function that `train.on_step_path` names; None where it names none.

    Raises:
        ConfigurationError: there is no such function, or it cannot be called with a step.
    """
    called = load_function(path, "on_step", flag="--train.on_step_path")
    if called is not None:
        StepCallback(called)  # refuses a function that cannot be called in this way
    return called


def load_function(path: str | None, usual: str, *, flag: str) -> Callable[..., Any] | None:
    """Returns the function that a setting names by its file, and by its name if that is not the usual one; None where
    the setting names none.

    Raises:
        ConfigurationError: there is no such function.
    """
    if path is None:
        return None
    place = FunctionPath.parse(path)
    name = place.name or usual
    function: Any = getattr(load_python(place.file, flag=flag), name, None)
    if not callable(function):
        raise ConfigurationError(f"{flag} {path} defines no function {name}: name one with {flag} {place.file}:NAME.")
    called: Callable[..., Any] = function
    return called


def make_profiler(config: Any, *others: object) -> StepProfiler:
    """Returns what profiles some steps of a run, in this process and in those of `others` that can be profiled."""
    profiled = [each for each in others if isinstance(each, Profiled)]
    output = Path(config.ckpt.output_dir)
    return StepProfiler(output / PROFILE, config.train.profile_steps, profiled, keep=partial(keep_locked, output))


def make_sinks(config: Any, steps: int, trackers: Mapping[str, Tracker]) -> MultiSink:
    """Returns the sinks of the metrics of a run of `steps` steps; `trackers` are those that `load_trackers` returns.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    ckpt, logger = config.ckpt, config.logger
    sinks: list[MetricSink] = [JsonlSink(Path(ckpt.output_dir) / METRICS_FILE)]
    if logger.console:
        sinks.append(ConsoleSink(steps))
    reports: list[MetricSink] = []
    if logger.tensorboard_dir is not None:
        reports.append(TensorBoardSink(Path(logger.tensorboard_dir)))
    reports += [_tracker(name, config, trackers) for name in logger.report_to]
    return MultiSink(sinks, _secrets(config), reports=reports, logging_steps=logger.logging_steps)


def _tracker(name: str, config: Any, trackers: Mapping[str, Tracker]) -> RunTracker:
    logger, directory = config.logger, Path(config.ckpt.output_dir)
    run = TrackedRun(
        project=logger.project,
        name=logger.run_name or directory.name,
        directory=directory,
        settings=public_settings(config),
        group=logger.group,
        organization=logger.organization,
    )
    make = trackers.get(name) or partial(_begin_tracking, name)
    return BackgroundSink(name, partial(make, run))


def _begin_tracking(name: str, run: TrackedRun) -> RunTracker:
    """Returns a tracker, whose package takes a second and more to import."""
    module = importlib.import_module(f"rollgrad.adapters.tracking.{name}")
    sink: RunTracker = getattr(module, SINKS[name])(run)
    return sink


def load_trackers(names: Sequence[str]) -> Mapping[str, Tracker]:
    """Returns the classes of the user's own among the trackers that `logger.report_to` names.

    Raises:
        ConfigurationError: one is none, or has not the methods of a tracker.
    """
    return {name: _own_tracker(name) for name in names if is_own_tracker(name)}


def _own_tracker(path: str) -> Tracker:
    place = FunctionPath.parse(path)
    found: Any = getattr(load_python(place.file, flag="--logger.report_to"), str(place.name), None)
    missing = [name for name in TRACKS if not callable(getattr(found, name, None))]
    is_class = inspect.isclass(found)
    if missing or not is_class:
        what = f"a class without {', '.join(missing)}" if is_class else "no class"
        raise ConfigurationError(
            f"--logger.report_to names {path}, which is {what}: a tracker is a class, made of the run, with "
            f"{', '.join(TRACKS)}; derived from rollgrad.domain.ports.run_tracker.RunTracker it needs only those in "
            "which it does something."
        )
    tracker: Tracker = found
    return tracker


def make_sample_log(config: RLConfig, codec: TemplateCodec, sink: MetricSink) -> SampleWriter:
    """Returns the writer of sampled texts. It hides the same secrets as `make_trajectories`, and passes the texts on to
    a sink that takes texts."""
    path = Path(config.ckpt.output_dir) / SAMPLES_FILE
    tell = sink.samples if isinstance(sink, RunTracker) else None
    return SampleWriter(path, codec.decode, config.logger.log_samples, secrets=_secrets(config), tell=tell)


def make_reply_log(config: RLConfig, codec: TemplateCodec, path: Path) -> ReplyWriter:
    """Returns the writer of an evaluation's replies, which hides what `make_trajectories` does."""
    return ReplyWriter(path, codec.decode, config.actor.model_name_or_path, secrets=_secrets(config))


def make_trajectories(config: RLConfig, codec: TemplateCodec) -> ParquetTrajectories:
    """Returns the writer of all rollouts, which hides the secrets of the environment, the command and the settings."""
    return ParquetTrajectories(
        Path(config.ckpt.output_dir) / TRAJECTORIES,
        codec,
        max_gib=config.logger.trajectories_max_gib,
        secrets=_secrets(config),
    )


def _secrets(config: Any) -> Spans:
    secrets = known_secrets() | secrets_of_settings(asdict(config))
    return lambda text: secret_spans(text, secrets)
