"""The synchronous pipeline: roll out, learn, hand over the weights, repeat.

Invariants: every rollout is sampled from the weights of the update before it; prompts submitted = trained + dropped
by reason; an interruption ends the run between two steps, with the model of the last finished one.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from attrs import field, frozen

from rollgrad.application.evaluation import EvaluationService
from rollgrad.application.experience import ExperienceService
from rollgrad.application.rollout import RolloutGroup
from rollgrad.application.sampling import GroupSampler
from rollgrad.application.update import UpdateService
from rollgrad.domain.entropy_control import EntropyController
from rollgrad.domain.errors import CheckpointError, RewardError
from rollgrad.domain.kl_control import KLController
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueObjective
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.domain.trajectory import Trajectory

log = structlog.get_logger(__name__)

SampleLog = Callable[[int, Sequence[RolloutGroup]], None]
"""Receives each step's groups, for people to read."""

FINAL_MODEL = "model"
"""Name of the model written at the end of a run."""


@frozen(kw_only=True)
class Schedule:
    """`steps` rollouts, the first `freezing_steps` of which train the critic alone; evaluation and model checkpoints
    every so many steps (-1: only at the ends), and the state from which training continues (-1: never). A sample passes
    from a score of `pass_threshold` on."""

    steps: int
    eval_steps: int = -1
    save_steps: int = -1
    state_steps: int = -1
    freezing_steps: int = 0
    pass_threshold: float = 1.0


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


class SyncPipeline:
    """Ties the services together."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        sampler: GroupSampler,
        experience: ExperienceService,
        update: UpdateService,
        policy: PolicyModel,
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
    ) -> None:
        self._schedule = schedule
        self._sampler = sampler
        self._experience = experience
        self._update = update
        self._policy = policy
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
        self._done = 0
        self._before: Mapping[str, float] = {}

    async def run(self) -> RunOutcome:
        """Trains to the end of the schedule, or until the task is cancelled (Ctrl-C), and saves the model."""
        after: Mapping[str, float] = {}
        interrupted = False
        try:
            if self._done:
                await self._channel.push(self._policy, self._done)
            else:
                self._before = await self._evaluate()
            while self._done < self._schedule.steps:
                await self._step()
                if self._due(self._schedule.eval_steps):
                    await self._evaluate()
                if self._due(self._schedule.save_steps):
                    self._save(f"step_{self._done}")
                if self._due(self._schedule.state_steps):
                    self._checkpoints.save_training(self.training_state())
            after = await self._evaluate()
        except asyncio.CancelledError:
            interrupted = True
            log.info("interrupted: saving the model", step=self._done)
        self._save(FINAL_MODEL)
        if self._schedule.state_steps > 0:
            self._checkpoints.save_training(self.training_state())
        return RunOutcome(steps=self._done, before=self._before, after=after, interrupted=interrupted)

    async def _step(self) -> None:
        """One rollout and the update it feeds."""
        schedule, clock = self._schedule, self._clock
        started = clock.monotonic()
        groups, sampling_metrics = await self._sampler.take(schedule.steps - self._done)
        generated = clock.monotonic()
        trajectories = [t for group in groups for t in group.trajectories]
        if not trajectories:
            raise RewardError(f"All {len(groups)} groups of step {self._done} failed: there is nothing to train on.")
        baselines = {g.group_id: g.baseline for g in groups if g.baseline is not None}
        experience = self._experience.make(trajectories, self._kl.coef, baselines)
        prepared = clock.monotonic()
        metrics = rollout_metrics(groups, schedule.pass_threshold) | sampling_metrics | experience.metrics
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
            self._kl = self._kl.update(metrics["policy/ref_kl"], len(trajectories))
        updated = clock.monotonic()
        self._done += 1
        await self._channel.push(self._policy, self._done)
        ended = clock.monotonic()
        metrics |= {
            "time/generate_s": generated - started,
            "time/experience_s": prepared - generated,
            "time/update_s": updated - prepared,
            "time/sync_s": ended - updated,
            "time/step_s": ended - started,
        }
        self._sink.log(self._done, metrics)
        self._sample_log(self._done, groups)

    def _due(self, every: int) -> bool:
        return every > 0 and self._done % every == 0 and self._done < self._schedule.steps

    async def _evaluate(self) -> Mapping[str, float]:
        if self._evaluation is None:
            return {}
        metrics = await self._evaluation.run()
        self._sink.log(self._done, metrics)
        return metrics

    def _save(self, name: str) -> None:
        self._checkpoints.save_model(self._policy, name)
        self._checkpoints.save_state(self.state_dict(), name)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, JSON-serialisable."""
        return {
            "step": self._done,
            **self._sampler.state_dict(),
            "kl": self._kl.state_dict(),
            "entropy": self._entropy.state_dict(),
            "experience": self._experience.state_dict(),
        }

    def training_state(self) -> dict[str, Any]:
        """All that a run needs to continue as if it had never been interrupted."""
        return {"run": self.state_dict(), "update": self._update.state_dict(), "before": dict(self._before)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `training_state` when `run` is called.

        Raises:
            CheckpointError: it is of a run with other settings.
        """
        run = state["run"]
        try:
            self._update.load_state_dict(state["update"])
            self._sampler.load_state_dict(run)
            self._experience.load_state_dict(run["experience"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"The training state is of a run with another model, optimizer or data ({type(error).__name__}: "
                f"{str(error)[:200]}): continue with the settings that the run started with."
            ) from error
        self._kl = self._kl.load_state_dict(run["kl"])
        self._entropy = self._entropy.load_state_dict(run["entropy"])
        self._done, self._before = int(run["step"]), dict(state["before"])


def rollout_metrics(groups: Sequence[RolloutGroup], pass_threshold: float) -> dict[str, float]:
    """What a rollout looked like: rewards, lengths (also by outcome), group spread, groups all of whose samples passed
    or failed, failures by kind, and the reward's own metrics.

    `rollout/entropy` is the mean of -log-prob over all sampled tokens, in nats.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    count = len(trajectories)
    lengths = [t.action_length for t in trajectories]
    scored = [group.scores for group in groups if group.trajectories]
    metrics = {
        "reward/mean": sum(t.reward for t in trajectories) / count,
        "reward/score_mean": sum(t.score for t in trajectories) / count,
        "rollout/samples": float(count),
        "rollout/entropy": -sum(float(t.logprobs_T.sum()) for t in trajectories) / sum(lengths),
        "rollout/response_length_mean": sum(lengths) / count,
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_share": sum(t.stop_reason.truncated for t in trajectories) / count,
        "rollout/zero_spread_share": sum(min(s) == max(s) for s in scored) / len(scored),
        "rollout/group_std_mean": sum(statistics.pstdev(s) for s in scored) / len(scored),
        "rollout/all_passed_share": sum(min(s) >= pass_threshold for s in scored) / len(scored),
        "rollout/all_failed_share": sum(max(s) < pass_threshold for s in scored) / len(scored),
    }
    for name, passed in (("passed", True), ("failed", False)):
        chosen = [t.action_length for t in trajectories if (t.score >= pass_threshold) is passed]
        if chosen:
            metrics[f"rollout/response_length_{name}"] = sum(chosen) / len(chosen)
    for failure in (f for group in groups for f in group.failures):
        name = f"rollout/failed_{failure.kind.value}"
        metrics[name] = metrics.get(name, 0.0) + 1.0
    for key in {key for t in trajectories for key in t.metrics}:
        values = [t.metrics[key] for t in trajectories if key in t.metrics]
        metrics[f"reward/{key}"] = sum(values) / len(values)
    return metrics
