"""What all pipelines share: the schedule of steps, evaluations and checkpoints, one update, interruption and resuming.

Invariants: prompts submitted = trained + dropped by reason + in flight; an interruption ends the run between two steps,
with the model and the training state of the last finished one. So does an error, but for one in the middle of an update
of several optimizer steps: the model then has those that were taken, and the training state is the one saved before.
Does not own: where the groups of a step come from, and when the engine takes new weights (its subclasses).
"""

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
import torch
from attrs import field, frozen

from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.metrics import rollout_metrics
from rollgrad.domain.control.entropy_weight import EntropyController
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.errors import CheckpointError, OutOfMemory, RewardError, WorkerError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore, TrainingState
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueModel, ValueObjective
from rollgrad.domain.ports.weight_channel import WeightChannel

log = structlog.get_logger(__name__)

SampleLog = Callable[[int, Sequence[RolloutGroup]], None]
"""Receives each step's groups, for people to read."""

SECONDS_PER_MINUTE = 60.0

FINAL_MODEL = "model"
"""Name of the model written at the end of a run."""


@frozen(kw_only=True)
class Schedule:
    """`steps` rollouts, the first `freezing_steps` of which train the critic alone; evaluation and model checkpoints
    every so many steps (-1: only at the ends). The state from which training continues is saved every `state_steps`
    steps (-1: not by steps), when the one before is `state_minutes` old (None: not by time), and at the end; never if
    neither is set. A sample passes from a score of `pass_threshold` on."""

    steps: int
    eval_steps: int = -1
    save_steps: int = -1
    state_steps: int = -1
    state_minutes: float | None = None
    freezing_steps: int = 0
    pass_threshold: float = 1.0

    @property
    def saves_state(self) -> bool:
        """Whether the run leaves a training state."""
        return self.state_steps > 0 or self.state_minutes is not None


class ObjectiveFactory(Protocol):
    """Makes the policy's loss for the current weights of its terms and the version under training."""

    def __call__(self, *, kl_coef: float, entropy_coef: float, version: int) -> PolicyObjective:
        """The objective of one update."""
        ...


@frozen(kw_only=True)
class RunOutcome:
    """`steps` finished; held-out metrics `before` and `after`; whether someone interrupted the run."""

    steps: int
    before: Mapping[str, float] = field(factory=dict)
    after: Mapping[str, float] = field(factory=dict)
    interrupted: bool = False


class GroupSource(Protocol):
    """Where a step's groups come from, as far as checkpoints are concerned."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, JSON-serialisable."""
        ...

    def kept_groups(self) -> list[dict[str, Any]]:
        """Returns the samples of groups that were played, and are not trained on yet; tensors are among them."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from a `state_dict` and the `kept_groups` of the same moment."""
        ...


class Pipeline(ABC):
    """Ties the services together; a subclass says what a step is."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        source: GroupSource,
        experience: ExperienceService,
        update: UpdateService,
        policy: PolicyModel,
        critic: ValueModel | None,
        channel: WeightChannel,
        objective: ObjectiveFactory,
        value_objective: ValueObjective | None,
        kl: KLController,
        entropy: EntropyController,
        evaluation: EvaluationService | None,
        sink: MetricSink,
        checkpoints: CheckpointStore,
        clock: Clock,
        sample_log: SampleLog,
        watch: LearningWatch,
        description: Mapping[str, Any],
    ) -> None:
        self._schedule = schedule
        self._source = source
        self._experience = experience
        self._update = update
        self._policy = policy
        self._critic = critic
        self._channel = channel
        self._objective = objective
        self._value_objective = value_objective
        self._kl = kl
        self._entropy = entropy
        self._evaluation = evaluation
        self._sink = sink
        self._checkpoints = checkpoints
        self._clock = clock
        self._sample_log = sample_log
        self._watch = watch
        self._description = description
        self._done = 0
        self._began = 0
        self._state_saved_at = 0.0
        self._before: Mapping[str, float] = {}
        self._evaluated: tuple[int, Mapping[str, float]] | None = None  # the last one's step and metrics

    async def run(self) -> RunOutcome:
        """Trains to the end of the schedule, or until the task is cancelled (Ctrl-C), and saves the model.

        Raises:
            RollgradError, or whatever ended the run: what was trained until then is saved before.
        """
        self._state_saved_at = self._clock.monotonic()
        after: Mapping[str, float] = {}
        interrupted = False
        try:
            try:
                after = await self._train()
            except asyncio.CancelledError:
                interrupted = True
                log.info("interrupted: saving the model", step=self._done)
            finally:
                await self._stop()
        except (Exception, SystemExit) as error:  # whatever it is, what was trained is not lost with it
            traceback.clear_frames(error.__traceback__)  # what they hold may be the memory that saving needs
            self._rescue(error)
            if _lacks_memory(error):
                raise OutOfMemory(
                    f"Step {self._done + 1} ran out of memory ({(str(error) or repr(error)).splitlines()[0]}): lower "
                    "--train.max_tokens_per_micro_batch or --rollout.max_batch_size, turn on "
                    "--actor.gradient_checkpointing, or see --dry_run for what takes how much."
                ) from error
            raise
        self._save(FINAL_MODEL)
        if self._schedule.saves_state:
            self._save_training()
        return RunOutcome(steps=self._done, before=self._before, after=after, interrupted=interrupted)

    async def _train(self) -> Mapping[str, float]:
        """The steps that are left; returns the last evaluation."""
        schedule = self._schedule
        await self._channel.push(self._policy, self._done)  # whatever weights the engine began with
        if not self._done:
            self._before = await self._evaluate()
        elif self._due(schedule.eval_steps):
            await self._evaluate()  # a run that was interrupted after this step may not have
        while self._done < schedule.steps:
            await self._step()
            if self._due(schedule.eval_steps):
                await self._evaluate()
            if self._due(schedule.save_steps):
                self._save(f"step_{self._done}")
            if self._due(schedule.state_steps) or self._state_is_old():
                self._save_training()
        return await self._evaluate()

    def _state_is_old(self) -> bool:
        minutes = self._schedule.state_minutes
        if minutes is None or self._done >= self._schedule.steps:
            return False
        return self._clock.monotonic() - self._state_saved_at >= SECONDS_PER_MINUTE * minutes

    def _rescue(self, error: BaseException) -> None:
        """Saves what was trained before `error`, as far as it can be; never raises, for `error` is what is raised."""
        if self._done == self._began and not self._update.under_way:
            return  # nothing was trained
        log.warning("the run ends early: saving the model", step=self._done, error=type(error).__name__)
        try:
            self._save(FINAL_MODEL)
            if self._update.under_way:
                log.warning("the model has optimizer steps of an update that was not finished", after_step=self._done)
            elif self._schedule.saves_state:
                self._save_training()
                log.warning("saved; --ckpt.resume continues the run", step=self._done)
        except Exception as second:  # a full disk, a lost process: what it is only decides what is there afterwards
            log.error("saving failed: what was saved before is still there", reason=str(second))

    def _save_training(self) -> None:
        """Saves the training state. Where nobody asked for it by steps, one that cannot be saved ends no run.

        Raises:
            CheckpointError: it was asked for, and cannot be saved.
        """
        state = self.training_state()
        try:
            self._checkpoints.save_training(TrainingState(step=self._done, state=state, description=self._description))
        except CheckpointError as error:
            if self._schedule.state_steps > 0:
                raise
            log.warning("no training state was saved", step=self._done, reason=str(error))
        self._state_saved_at = self._clock.monotonic()

    @abstractmethod
    async def _step(self) -> None:
        """One update; counts it in `_done`, and reports it."""

    @abstractmethod
    async def _stop(self) -> None:
        """Ends what is still in flight when the steps are over, however they ended."""

    def _learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """The update that `groups` feed; returns what is to report about it and them. One that fails before its first
        optimizer step leaves everything as it was.

        Raises:
            RewardError: every episode of the groups failed.
        """
        entropy, experience = self._entropy, self._experience.state_dict()
        try:
            return self._learned(groups)
        except BaseException:
            self._entropy = entropy
            self._experience.load_state_dict(experience)
            raise

    def _learned(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        schedule, clock = self._schedule, self._clock
        started = clock.monotonic()
        trajectories = [t for group in groups for t in group.trajectories]
        if not trajectories:
            raise RewardError(f"All {len(groups)} groups of step {self._done} failed: there is nothing to train on.")
        baselines = {g.group_id: g.baseline for g in groups if g.baseline is not None}
        experience = self._experience.make(trajectories, self._kl.coef, baselines)
        prepared = clock.monotonic()
        metrics = rollout_metrics(groups, schedule.pass_threshold) | experience.metrics
        self._entropy = self._entropy.observe(metrics["rollout/entropy"])
        objective = self._objective(kl_coef=self._kl.coef, entropy_coef=self._entropy.weight, version=self._done + 1)
        metrics |= self._update.run(
            experience.batch,
            objective,
            self._value_objective,
            train_policy=self._done >= schedule.freezing_steps,
        )
        if self._entropy.target is not None:
            metrics["policy/entropy_coef"] = self._entropy.weight
        if "policy/ref_kl" in metrics:
            metrics["policy/kl_coef"] = self._kl.coef
            self._kl = self._kl.update(metrics["policy/ref_kl"], experience.batch.rollouts)
        ended = clock.monotonic()
        return metrics | {"time/experience_s": prepared - started, "time/update_s": ended - prepared}

    async def _push(self) -> dict[str, float]:
        """Hands the weights over; what it took is to be reported."""
        moved = await self._channel.push(self._policy, self._done)
        if not moved["bytes"]:
            return {}
        return {"sync/bytes": moved["bytes"], "sync/gb_per_s": moved["bytes"] / 1e9 / max(moved["seconds"], 1e-9)}

    def _report(self, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        self._sink.log(self._done, metrics)
        self._sample_log(self._done, groups)
        self._watch, found = self._watch.observe(self._done, metrics)
        for finding in found:
            log.warning(str(finding), finding=finding.name, since_step=finding.since, step=self._done)

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences for the end of the run; see `LearningWatch.summary`."""
        return self._watch.summary()

    def _due(self, every: int) -> bool:
        return every > 0 and self._done % every == 0 and self._done < self._schedule.steps

    async def _evaluate(self) -> Mapping[str, float]:
        """Held-out metrics after the last finished step, of which there is one row in the logs."""
        if self._evaluation is None:
            return {}
        if self._evaluated is None or self._evaluated[0] != self._done:
            metrics = await self._evaluation.run()
            self._sink.log(self._done, metrics)
            self._evaluated = self._done, metrics
        return self._evaluated[1]

    def _save(self, name: str) -> None:
        self._checkpoints.save_model(self._policy, name, self._critic)
        self._checkpoints.save_state(self.state_dict(), name)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, JSON-serialisable."""
        return {
            "step": self._done,
            **self._source.state_dict(),
            "kl": self._kl.state_dict(),
            "entropy": self._entropy.state_dict(),
            "experience": self._experience.state_dict(),
        }

    def training_state(self) -> dict[str, Any]:
        """All that a run needs to continue as if it had never been interrupted."""
        state = {
            "run": self.state_dict(),
            "groups": self._source.kept_groups(),
            "update": self._update.state_dict(),
            "before": dict(self._before),
        }
        if self._evaluated is not None:
            step, metrics = self._evaluated
            state["evaluated"] = {"step": step, "metrics": dict(metrics)}
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `training_state` when `run` is called.

        Raises:
            CheckpointError: it is of a run with other settings.
        """
        try:
            run = state["run"]
            self._done, self._before = int(run["step"]), dict(state["before"])
            self._kl = self._kl.load_state_dict(run["kl"])
            self._entropy = self._entropy.load_state_dict(run["entropy"])
            self._source.load_state_dict(run, state.get("groups", ()))  # earlier states have none
            self._experience.load_state_dict(run["experience"])
            self._update.load_state_dict(state["update"])
            if "evaluated" in state:
                self._evaluated = int(state["evaluated"]["step"]), dict(state["evaluated"]["metrics"])
        except (CheckpointError, WorkerError):
            raise
        except Exception as error:  # a state of other settings or hands fails wherever it differs
            if _lacks_memory(error):
                raise
            raise CheckpointError(
                f"The training state is of a run with another model, optimizer or data ({type(error).__name__}: "
                f"{str(error)[:200]}): continue with the settings that the run started with."
            ) from error
        self._began = self._done


def _lacks_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left: torch raises a plain RuntimeError for that on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
