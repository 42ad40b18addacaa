"""A run: a schedule of steps, evaluations and checkpoints, early ends and resuming, whatever a step is.

Invariants: an interruption ends the run between two steps, with the model and the training state of the last finished
one. So does an error, but for one in the middle of an update of several optimizer steps: the model then has those that
were taken, and the training state is the one saved before. Weights with which nothing can be computed are never saved.
Does not own: what a step does (its `StepSource`), nor how models learn (`TrainedModels`).
"""

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
from attrs import evolve

from rollgrad.application.foreign import first_line, is_being_cancelled, lacks_memory
from rollgrad.application.interruption import Interrupted
from rollgrad.application.pipelines.schedule import RunOutcome, Schedule
from rollgrad.application.pipelines.state_writing import StateWriter
from rollgrad.application.pipelines.step_callback import Ask, RunAccess, StepCallback
from rollgrad.application.pipelines.step_source import Evaluation, StepReport, StepSource, TrainedModels, finished
from rollgrad.domain.control.best_model import BestModel, measured_alike
from rollgrad.domain.control.findings import Finding, LearningWatch
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.errors import (
    CheckpointError,
    ExplodedWeightsError,
    ForeignError,
    OutOfMemory,
    WorkerError,
)
from rollgrad.domain.ports.checkpoint_store import CheckpointStore, TrainingState
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.run_tracker import RunTracker

log = structlog.get_logger(__name__)

SECONDS_PER_MINUTE = 60.0

FINAL_MODEL, BEST_MODEL = "model", "best"
"""Names of the model written at the end of a run, and of the one with the best evaluation."""

Sample = TypeVar("Sample")


class Run(Generic[Sample]):
    """Takes the steps of a schedule.

    Args:
        schedule: number of steps, and intervals of evaluations and checkpoints.
        steps: makes the steps.
        models: the models that are trained, saved and restored.
        evaluation: None without held-out data.
        sink: records metrics.
        sample_log: receives the number of each step and its samples; None keeps none.
        on_step: the caller's function of the number of each finished step, its metrics and its samples
            (`StepCallback`).
        ask: samples replies for `on_step`; None where no engine samples.
        checkpoints: keeps models and training states.
        clock: measures the age of the last training state.
        watch: finds reasons why the run cannot learn.
        description: identifies the run in its training states, which say in it where they are (`position`).
        less_memory: what a user may do if memory runs out, as the end of a sentence.
        usage: measures what the machine is used for, after each step.
        profile: makes the context in which a step is taken, from its number.

    Raises:
        ConfigurationError: `on_step` cannot be called so.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        steps: StepSource[Sample],
        models: TrainedModels,
        evaluation: Evaluation | None,
        sink: MetricSink,
        sample_log: Callable[[int, Sequence[Sample]], None] | None,
        checkpoints: CheckpointStore,
        clock: Clock,
        watch: LearningWatch,
        description: Mapping[str, Any],
        less_memory: str,
        usage: Callable[[], Mapping[str, float]] = dict,
        profile: Callable[[int], AbstractAsyncContextManager[None]] = lambda step: nullcontext(),
        on_step: Callable[..., Any] | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._schedule = schedule
        self._steps = steps
        self._models = models
        self._evaluation = evaluation
        self._sink = sink
        self._sample_log = sample_log
        self._checkpoints = checkpoints
        self._clock = clock
        self._watch = watch
        self._description = description
        self._less_memory = less_memory
        self._usage = usage
        self._profile = profile
        self._on_step = StepCallback(on_step)
        self._access = RunAccess(self._evaluate, ask)
        self._done = 0
        self._began = 0
        self._kept_model = 0  # the last step whose model the schedule had saved
        self._states = StateWriter(checkpoints, required=schedule.state_steps > 0)
        self._state_saved_at = 0.0
        self._before: Mapping[str, float] = {}
        self._evaluated: tuple[int, Mapping[str, float]] | None = None  # the last one's step and metrics
        self._best = BestModel(schedule.best_metric, best=schedule.best_value, measured=schedule.measured)

    async def run(self, on_save: Callable[[], None] = lambda: None) -> RunOutcome:
        """Trains to the end of the schedule, or until the task is cancelled (Ctrl-C), and saves the model.

        `on_save` is called, in a thread, when a model or a training state was saved on the way: programs and engines
        are answered meanwhile.

        Raises:
            RollgradError, or any error that ended the run: the training so far is saved first.
        """
        self._state_saved_at = self._clock.monotonic()
        after: Mapping[str, float] = {}
        interrupted = False
        try:
            try:
                after = await self._train(on_save)
            except asyncio.CancelledError as error:
                if isinstance(error, Interrupted):  # the run's own cancellation comes when the loop is free: now
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(0)
                if not is_being_cancelled():
                    raise ForeignError(
                        f"Step {self._done + 1} was cancelled though nobody asked for it: something it called gave up."
                    ) from error
                interrupted = True
                log.info("interrupted: saving the model", step=self._done)
            finally:
                await self._steps.stop()
            self._states.finish()
        except (Exception, SystemExit) as error:  # of any kind: the training so far must not be lost
            traceback.clear_frames(error.__traceback__)  # saving may need the memory of their variables
            self._tell_failure(error)
            self._rescue(error)
            if lacks_memory(error):
                raise OutOfMemory(
                    f"Step {self._done + 1} ran out of memory: {self._less_memory} {first_line(error)}"
                ) from error
            raise
        try:
            self._save_last(interrupted=interrupted)
        except Exception as error:
            self._tell_failure(error)
            raise
        enough = self._enough if self._done < self._schedule.steps and not interrupted else None
        return RunOutcome(
            steps=self._done,
            before=self._before,
            after=after,
            interrupted=interrupted,
            enough=enough,
            best=None if self._best.value is None else self._best,
        )

    async def _train(self, on_save: Callable[[], None]) -> Mapping[str, float]:
        """Takes the remaining steps; returns the last evaluation."""
        schedule = self._schedule
        if 0 < self._began >= schedule.steps:
            log.warning(
                f"nothing is left to train: the run has taken {self._done} steps, and is set to {schedule.steps}; more "
                "steps or epochs go on"
            )
        await self._steps.start(self._done)
        if not self._done:
            self._before = await self._evaluate()
        else:  # a run that was interrupted after this step may have missed what was due
            if self._due(schedule.eval_steps):
                await self._evaluate()
            if self._due(schedule.save_steps) and self._kept_model != self._done:
                self._keep_model()
        while self._done < schedule.steps and self._enough is None:
            async with self._profile(self._done + 1):
                report = await self._steps.step(self._done)
            await self._count(report)
            self._states.look()
            if self._due(schedule.eval_steps):
                await self._evaluate()
            model_due = self._due(schedule.save_steps)
            state_due = self._due(schedule.state_steps) or self._state_is_old()
            if model_due:
                self._keep_model()
            if state_due:
                self._save_training(in_background=schedule.state_in_background)
            if model_due or state_due:
                await finished(asyncio.to_thread(on_save))
        if self._done < schedule.steps:
            log.info("the run ends before all its steps", why=self._enough, step=self._done)
        return await self._evaluate()

    @property
    def _enough(self) -> str | None:
        """Says that the caller has ended the run, or that too many evaluations were no better than the best one."""
        asked = self._on_step.enough
        return self._best.exhausted(self._schedule.patience) if asked is None else asked

    async def _count(self, report: StepReport[Sample]) -> None:
        """Counts and reports a finished step.

        Raises:
            ForeignError: the caller's `on_step` failed.
            BaseException: the report's `ended_by`.
        """
        self._done += 1
        metrics = {**report.metrics, **self._usage()}
        try:  # also of a step that an interruption waited for, which is not taken again: unless it would wait longer
            if report.ended_by is None or not self._on_step.waits:
                added = await self._on_step(self._done, metrics, report.samples, self._access)
                metrics = {**metrics, **added}
        finally:  # the step is recorded in any case
            self._record(metrics, report.samples)
        if report.ended_by is not None:
            raise report.ended_by

    def _record(self, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        self._sink.log(self._done, metrics)
        if self._sample_log is not None:
            self._sample_log(self._done, samples)
        self._tell(*self._watch.observe(self._done, metrics))

    def _tell(self, watch: LearningWatch, findings: Sequence[Finding]) -> None:
        self._watch = watch
        for finding in findings:
            log.warning(str(finding), finding=finding.name, since_step=finding.since, step=self._done)

    def _state_is_old(self) -> bool:
        minutes = self._schedule.minutes_to_state(first=not self._began and self._states.written is None)
        if minutes is None or self._done >= self._schedule.steps:
            return False
        return self._clock.monotonic() - self._state_saved_at >= SECONDS_PER_MINUTE * minutes

    def _tell_failure(self, error: BaseException) -> None:
        if not isinstance(self._sink, RunTracker):
            return
        try:
            self._sink.fail(f"{type(error).__name__}: {first_line(error)}")
        except Exception as second:  # of a caller's own tracker: the training must be saved in any case
            log.warning("the tracker does not know that the run failed", reason=repr(second))

    def _rescue(self, error: BaseException) -> None:
        """Saves the training before `error`, as far as possible; it never raises, because `error` must be raised."""
        if self._done == self._began and not self._models.under_way:
            return  # nothing was trained
        exploded = isinstance(error, ExplodedWeightsError)
        effect = ", and its weights are not saved: what was saved before is there" if exploded else ": saving the model"
        log.warning(f"the run ends early{effect}", step=self._done, error=type(error).__name__)
        try:
            self._states.finish()
        except Exception as second:  # the state before could not be written; it may be `error` itself
            log.warning("no training state was saved", reason=str(second))
        saves = not exploded
        try:
            if not exploded:
                self._save_last()
                if self._models.under_way:
                    log.warning("the model has some steps of an update that was not finished", after_step=self._done)
        except Exception as second:  # a full disk, a lost process: the first error is raised in any case
            log.error("saving failed: what was saved before is still there", reason=str(second))
            saves = False
        self._states.tell_lost(done=self._done, began=self._began, saved=saves)

    def _save_last(self, *, interrupted: bool = False) -> None:
        """Saves the model and the training state, which may be on another disk, each also where the other cannot be.
        An interrupted run saves the state first, from which it goes on if it is killed meanwhile."""
        first, second = (partial(self._save, FINAL_MODEL), self._save_training)[:: -1 if interrupted else 1]
        try:
            first()
        except Exception:
            with suppress(CheckpointError):  # the first error says where the model is
                second()
            raise
        second()

    def _save_training(self, *, in_background: bool = False) -> None:
        """Saves the training state, or begins to, if any is saved and no update is under way.

        Raises:
            CheckpointError: saving by steps is set, and the state, or the one before, cannot be saved; else it is told.
        """
        if not self._schedule.saves_state or self._models.under_way:
            return
        self._states.finish()  # before another one is in memory
        state = self.training_state()
        description = {**self._description, "position": state["run"]}
        saved = TrainingState(step=self._done, state=state, description=description)
        if in_background:
            self._states.begin(saved)
        else:
            self._states.save(saved)
        self._state_saved_at = self._clock.monotonic()

    @property
    def learning(self) -> LearningSettings:
        """Settings that findings depend on."""
        return self._watch.run

    @property
    def best(self) -> BestModel:
        """The best evaluation so far; of a run that continues, also what is `left` of the one by another measure."""
        return self._best

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences for the end of the run (`LearningWatch.summary`)."""
        return self._watch.summary()

    def watch_on(self, logged: Mapping[str, Mapping[int, float]]) -> None:
        """Watches on after the steps whose metrics are `logged`, by name and step, so that a run which continues is
        compared with its beginning. A finding that holds is reported again."""
        watch = LearningWatch(self._watch.run).after(logged)
        self._tell(watch, watch.holding)

    def _due(self, every: int) -> bool:
        return every > 0 and self._done % every == 0 and self._done < self._schedule.steps

    async def _evaluate(self) -> Mapping[str, float]:
        """Returns held-out metrics after the last finished step, of which there is one row in the logs."""
        if self._evaluation is None:
            return {}
        if self._evaluated is None or self._evaluated[0] != self._done:
            metrics = await self._evaluation.run(self._done)
            self._sink.log(self._done, metrics)
            self._tell(*self._watch.evaluated(self._done, metrics))
            best = self._best.after(self._done, metrics)
            if (best.step, best.value) != (self._best.step, self._best.value):
                self._save(BEST_MODEL)
            self._evaluated, self._best = (self._done, metrics), best
        return self._evaluated[1]

    def _keep_model(self) -> None:
        self._save(f"step_{self._done}")
        self._kept_model = self._done

    def _save(self, name: str) -> None:
        self._models.save(self._checkpoints, name)
        self._checkpoints.save_state(self.state_dict(), name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run, JSON-serialisable."""
        return {"step": self._done, **self._steps.state_dict()}

    def training_state(self) -> dict[str, Any]:
        """Returns everything that a run needs to continue as if it had never been interrupted."""
        state: dict[str, Any] = {
            "run": self.state_dict(),
            "groups": self._steps.kept_samples(),
            "update": self._models.state_dict(),
            "before": dict(self._before),
            "measured": dict(self._schedule.measured),
            "evaluations_since": self._watch.run.evaluations_since,
            "best": self._best.state_dict(),
            "kept_model": self._kept_model,
        }
        if self._evaluated is not None:
            state["evaluated"] = {"step": self._evaluated[0], "metrics": dict(self._evaluated[1])}
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `training_state` when `run` is called.

        Raises:
            CheckpointError: the state is of a run with other settings.
        """
        try:
            run, measured = state["run"], self._schedule.measured
            alike = measured_alike(state.get("measured", measured), measured)  # or not known
            self._done, self._before = int(run["step"]), dict(state["before"]) if alike else {}
            since = int(state.get("evaluations_since", 0)) if alike else self._done + 1
            self._watch = LearningWatch(evolve(self._watch.run, evaluations_since=since))
            self._steps.load_state_dict(run, state.get("groups", ()))  # earlier states have none
            self._models.load_state_dict(state["update"])
            self._best = self._best.continued(state.get("best", {}))
            self._kept_model = int(state.get("kept_model", self._done))  # earlier states do not say
            if "evaluated" in state:
                self._evaluated = int(state["evaluated"]["step"]), dict(state["evaluated"]["metrics"])
        except (CheckpointError, WorkerError):
            raise
        except Exception as error:  # a state of other settings, or a forged one, fails in many ways
            if lacks_memory(error):
                raise
            raise CheckpointError(
                f"The training state is of a run with another model, optimizer or data ({type(error).__name__}: "
                f"{str(error)[:200]}): continue with the settings that the run started with."
            ) from error
        self._began = self._done
