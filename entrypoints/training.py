"""Common parts of the library faces of all trainers: the directory, resuming, signals, the report at the end."""

import asyncio
import copy
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from attrs import AttrsInstance, asdict, evolve, field, frozen

from rollgrad.adapters.checkpoints.files import make_writable
from rollgrad.adapters.checkpoints.hub import check_upload, upload_model
from rollgrad.adapters.checkpoints.names import METRICS_FILE, TRAINING_STATE, numbered
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.adapters.system.stop_signals import deaf, heeding_signals
from rollgrad.adapters.tracking.metrics_file import Series, read_metrics
from rollgrad.application.foreign import first_line
from rollgrad.application.pipelines.run import BEST_MODEL, FINAL_MODEL, Run
from rollgrad.application.pipelines.schedule import RunOutcome
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.still_weights import still_sentences
from rollgrad.domain.control.best_model import BestModel
from rollgrad.domain.ports.checkpoint_store import CheckpointStore, TrainingState
from rollgrad.entrypoints.composition.base import BaseContainer
from rollgrad.entrypoints.composition.lifetimes import closing, shut_down
from rollgrad.entrypoints.description import check_continues, settings_file
from rollgrad.entrypoints.model_card import write_model_card
from rollgrad.entrypoints.redaction import known_secrets, redact
from rollgrad.entrypoints.reporting import report_aside, report_run
from rollgrad.entrypoints.run_directory import (
    LOGS,
    bring_best_back,
    check_output,
    continues,
    keep_best_apart,
    keep_steps,
    keep_trajectories,
    last_step,
    remove_run,
    write_config,
)
from rollgrad.entrypoints.run_record import RunRecord

log = structlog.get_logger(__name__)

REPORT_SECONDS = 300.0
"""Least time between two reports on the way."""
REPORT_SHARE = 0.01
"""Largest share of a run's time that goes into reports on the way: each reads all rollouts that the run has kept."""

Result = TypeVar("Result")


class TrainingRun(AttrsInstance, Protocol):
    """The sections of a run's settings that are read here."""

    @property
    def ckpt(self) -> CheckpointConfig:
        """Returns the section `ckpt`."""
        ...

    @property
    def logger(self) -> LoggerConfig:
        """Returns the section `logger`."""
        ...

    @property
    def cluster(self) -> ClusterConfig:
        """Returns the section `cluster`."""
        ...


Settings = TypeVar("Settings", bound=TrainingRun)


@frozen(kw_only=True)
class TrainResult:
    """Result of a run.

    `output_dir` holds `model/` (Hugging Face format), `metrics.jsonl`, `samples.jsonl` and the report. `before` and
    `after` are the held-out metrics, empty without an evaluation set. `findings` are sentences that say why the run
    could not learn, empty if it could.
    """

    output_dir: Path
    steps: int
    before: Mapping[str, float] = field(factory=dict)
    after: Mapping[str, float] = field(factory=dict)
    report: Path | None = None
    interrupted: bool = False
    stopped_by: int | None = None
    """Signal that interrupted the run: SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2."""
    findings: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        """Directory of the trained model."""
        return self.output_dir / "model"


def from_anywhere(config: Settings) -> Settings:
    """Returns the settings with absolute paths of all outputs: users' code may change the current directory."""
    states, tensorboard = config.ckpt.state_dir, config.logger.tensorboard_dir
    changed: Any = copy.copy(config)
    changed.ckpt = evolve(
        config.ckpt,
        output_dir=str(Path(config.ckpt.output_dir).absolute()),
        state_dir=states and str(Path(states).absolute()),
    )
    changed.logger = evolve(config.logger, tensorboard_dir=tensorboard and str(Path(tensorboard).absolute()))
    return changed  # type: ignore[no-any-return] # attrs' evolve takes no protocol


def train_in(
    config: TrainingRun,
    container: BaseContainer,
    *,
    title: str,
    check: Callable[[], None] = lambda: None,
    before_run: Callable[[], None],
) -> TrainResult:
    """Takes a run from its training state, or from its beginning, to its end.

    Args:
        config: the run's settings.
        container: has its providers `run`, `description` and `checkpoints`; its resources are closed.
        title: title of the report.
        check: is called before anything is loaded, and raises what is wrong with the run's inputs.
        before_run: is called when everything is loaded and nothing is trained yet.

    Raises:
        RollgradError, or any error that ended the run: the training so far is saved first.
    """
    saved = _saved_state(config, container)
    with ExitStack() as until_reported:
        try:
            run = _begin(config, container, saved, check)
            try:
                outcome, stopped_by = _run_on_record(
                    run, config, container, title, None if saved is None else saved.step, before_run, until_reported
                )
            except (Exception, SystemExit):  # whatever ended the run, it is reported, with its end
                report_run(Path(config.ckpt.output_dir), title)
                raise
        finally:
            shut_down(container)
        return _finish(config, title, outcome, stopped_by, run.findings)


def _saved_state(config: TrainingRun, container: Any) -> TrainingState | None:
    """Returns the training state that the run continues from, None where it begins anew.

    Raises:
        RollgradError: the run could not write its outputs, or is another one than that of the state.
    """
    check_output(config)  # again: another run may have been there until now
    if config.ckpt.push_to_hub is not None:
        check_upload(config.ckpt.push_to_hub)  # now, not after hours of training
    store: CheckpointStore = container.checkpoints()  # refuses an unwritable output before anything is loaded
    if config.logger.tensorboard_dir is not None:
        make_writable(Path(config.logger.tensorboard_dir), "--logger.tensorboard_dir")
    saved = store.load_training() if continues(config.ckpt) else None
    if saved is not None:
        check_continues(saved.description, container.description(), type(config))
    return saved


def _begin(config: TrainingRun, container: Any, saved: TrainingState | None, check: Callable[[], None]) -> Run[Any]:
    """Loads the run, puts it in the state that it continues from, and makes the output directory fit that state."""
    container.on_step()  # what a user's files hold, before anything is loaded
    container.trackers()
    container.own_optimizers()
    check()
    run: Run[Any] = container.run()
    output_dir = Path(config.ckpt.output_dir)
    if saved is not None:
        run.resume(saved.state)
    elif config.ckpt.overwrite:  # only now, so that a run that cannot begin replaces nothing
        remove_run(config.ckpt)
    elif logged := last_step(output_dir):  # --ckpt.resume auto has found a run, but no state to continue from
        log.warning("the run starts anew: there is no training state of the steps that it logged", steps=logged)
    last_kept = -1 if saved is None else saved.step
    for name in LOGS:
        keep_steps(output_dir / name, until=last_kept)
    keep_trajectories(output_dir, until=last_kept)
    if saved is not None:
        run.watch_on(_logged(output_dir / METRICS_FILE))
        if run.best.metric is not None:
            _find_best(output_dir, run.best)
    write_config(output_dir, settings_file(config))
    return run


def _run_on_record(
    run: Run[Any],
    config: TrainingRun,
    container: BaseContainer,
    title: str,
    continued_from: int | None,
    before_run: Callable[[], None],
    until_reported: ExitStack,
) -> tuple[RunOutcome, int]:
    """Runs to the end, with a record of how it ended, and closes what belongs to its event loop. Returns the outcome
    and the signal that interrupted the run, if one did; others then have no effect until `until_reported` closes."""
    output_dir = Path(config.ckpt.output_dir)
    states, learning = Path(config.ckpt.state_dir or output_dir), asdict(run.learning)
    with RunRecord(output_dir, learning=learning, continued_from=continued_from, states=states) as record:
        for sentence in still_sentences(config):
            log.warning(sentence)
        before_run()
        on_save = _reporting(output_dir, title)
        try:
            outcome, stopped_by = run_to_end(heeding_signals(closing(run.run(on_save), container)))
        except KeyboardInterrupt:  # a second Ctrl-C, while the first one ends the run
            _tell_broken_off(states)
            raise
        if outcome.interrupted:
            until_reported.enter_context(deaf())
            record.interrupted(signal.Signals(stopped_by).name)
        elif outcome.enough is not None:
            record.finished(outcome.enough)
    return outcome, stopped_by


def _tell_broken_off(states: Path) -> None:
    """Says from where a run goes on whose end, in which it saves, was broken off."""
    newest = numbered(states, TRAINING_STATE)
    from_where = f"--ckpt.resume continues it from step {newest[0][0]}" if newest else "it has no training state"
    log.warning(f"Ctrl-C broke off the end of the run, so that not all may be saved: {from_where}")


def _finish(
    config: TrainingRun, title: str, outcome: RunOutcome, stopped_by: int, findings: tuple[str, ...]
) -> TrainResult:
    """Describes, reports and publishes what the run has written."""
    output_dir = Path(config.ckpt.output_dir)
    model = output_dir / FINAL_MODEL
    _describe_model(model, config, outcome.steps, outcome.before, outcome.after)
    if outcome.best is not None:
        model = output_dir / BEST_MODEL
        _describe_model(model, config, outcome.best.step, outcome.before, outcome.best.metrics)
    report = report_run(output_dir, title)
    if config.ckpt.push_to_hub is not None:  # last: all else is on the disk, however long this takes
        _publish(model, config.ckpt.push_to_hub, interrupted=outcome.interrupted)
    return TrainResult(
        output_dir=output_dir,
        steps=outcome.steps,
        before=outcome.before,
        after=outcome.after,
        report=report,
        interrupted=outcome.interrupted,
        stopped_by=stopped_by if outcome.interrupted else None,
        findings=findings,
    )


def _find_best(output_dir: Path, best: BestModel) -> None:
    """Makes the best model on the disk the one that the training state of a continued run names."""
    if best.value is not None:
        bring_best_back(output_dir, best.step)
    elif best.left and (apart := keep_best_apart(output_dir, best.left["step"])):
        log.warning(
            "the best model so far was chosen by another evaluation, so that a new search for the best begins",
            kept_as=str(apart),
        )


def _logged(path: Path) -> Mapping[str, Series]:
    """Returns the metrics that a continued run has logged; none if the log is gone, which is no reason to fail."""
    try:
        return read_metrics(path)
    except OSError as error:
        log.warning("findings begin anew, without the steps before", reason=str(error))
        return {}


def _describe_model(
    model: Path, config: TrainingRun, steps: int, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    try:
        write_model_card(model, config, steps=steps, before=before, after=after)
    except OSError as error:  # a full disk, perhaps: the model is there
        log.warning("the model has no README", reason=str(error))


def _publish(model: Path, repository: str, *, interrupted: bool) -> None:
    if interrupted:
        log.warning(
            "the model is not uploaded, as the run was interrupted: --ckpt.resume continues it and uploads the model "
            f"at its end; hf upload {repository} {model} uploads this one"
        )
    else:
        upload(model, repository)


def upload(model: Path, repository: str) -> None:
    """Uploads a model to the hub; a failure is reported, and is no reason to fail."""
    try:
        log.info("the model is on the hub", model=str(model), commit=upload_model(model, repository))
    except Exception as error:  # of any kind: none is a reason to lose the run's result
        log.warning(
            f"the model could not be uploaded; hf upload {repository} {model} does it",
            reason=redact(first_line(error), known_secrets()),
        )


def _reporting(output_dir: Path, title: str) -> Callable[[], None]:
    """Returns a function that writes the report, so that a run that is killed leaves one, too. It does nothing where
    the last report is less than `REPORT_SECONDS` old, or reports would take more than `REPORT_SHARE` of the time."""
    due = time.monotonic() + REPORT_SECONDS

    def write() -> None:
        nonlocal due
        began = time.monotonic()
        if began >= due:
            report_aside(output_dir, title)
            ended = time.monotonic()
            due = ended + max(REPORT_SECONDS, (ended - began) / REPORT_SHARE)

    return write


def run_interruptibly(work: Coroutine[Any, Any, Result], says: str) -> Result:
    """Returns what `work` returns. SIGTERM and the like end it as Ctrl-C does, so that what it opened is closed; the
    signal is logged with the text `says`.

    Raises:
        KeyboardInterrupt: a signal ended it.
    """
    try:
        return run_to_end(heeding_signals(work, says))[0]
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
