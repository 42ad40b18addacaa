"""A run over fakes, synchronous or asynchronous, and everything that it was built from."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attrs import define, evolve, field

from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.pipelines.alternating import Alternating, Resting
from rollgrad.application.pipelines.learner import RLLearner
from rollgrad.application.pipelines.overlapping import Overlapping
from rollgrad.application.pipelines.run import Run as WholeRun
from rollgrad.application.pipelines.schedule import RunOutcome, Schedule
from rollgrad.application.pipelines.step_source import StepSource
from rollgrad.application.rollouts.evaluation import EvaluationService
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.rollouts.sampler import GroupSampler, SamplingPlan
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import AdvantageSettings, Aggregation, KLSettings
from rollgrad.domain.control.entropy_weight import EntropyController
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.control.staleness import StalenessBound
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.checkpoint_store import FakeCheckpointStore
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.metric_sink import FakeMetricSink
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeReference
from rollgrad.testing.prompt_source import FakePromptSource
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from rollgrad.testing.weight_channel import FakeWeightChannel

PARAMS = SamplingParams(max_new_tokens=3)
PROMPTS = [Prompt(token_ids=(index + 1,), text=str(index), label=index) for index in range(5)]
GROUPS, SAMPLES = 2, 3


def bytes_above_half(request: RewardRequest) -> float:
    """The share of the second half of the alphabet."""
    return sum(character >= "@" for character in request.response) / 3


@define
class Run:
    """A run and everything it was built from."""

    pipeline: WholeRun[RolloutGroup]
    update: UpdateService
    engine: FakeRolloutEngine
    policy: FakePolicy
    channel: FakeWeightChannel
    sink: FakeMetricSink
    checkpoints: FakeCheckpointStore
    prompts: FakePromptSource
    rewards: FakeRewardSource
    clock: FakeClock
    sampled: list[tuple[int, list[RolloutGroup]]] = field(factory=list)

    def train(self) -> RunOutcome:
        """Runs it to its end."""
        return asyncio.run(self.pipeline.run())

    @property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of each update."""
        return [metrics for _, metrics in self.sink.records if "rollout/samples" in metrics]


def make_run(
    root: Path,
    *,
    steps: int = 3,
    eval_steps: int = -1,
    save_steps: int = -1,
    state_steps: int = -1,
    state_minutes: float | None = None,
    state_in_background: bool = False,
    evaluation: bool = False,
    kl: KLController | None = None,
    max_failures: int | None = 0,
    value: Callable[[RewardRequest], float] = bytes_above_half,
    policy: FakePolicy | None = None,
    params: SamplingParams = PARAMS,
    group_filter: GroupFilter | None = None,
    curriculum: Curriculum | None = None,
    bound: StalenessBound | None = None,
    pause: PauseMode = PauseMode.WAIT,
    in_flight: int = GROUPS,
    sleeper: FakeRolloutEngine | None = None,
    resting: Sequence[Resting] = (),
) -> Run:
    """Two groups of three samples an update; asynchronous where there is a `bound`. `sleeper`: the engine, if it is to
    sleep while models train; `resting`: models whose optimizers sleep while it samples."""
    controller = kl or KLController(coef=0.0)
    policy = policy or FakePolicy(torch.linspace(-0.5, 0.5, VOCABULARY))
    engine, rewards, prompts, clock = (
        sleeper or FakeRolloutEngine(),
        FakeRewardSource(value),
        FakePromptSource(PROMPTS),
        FakeClock(),
    )
    sampled = ContinuingEngine(engine) if pause is PauseMode.ABORT else engine
    executor = SingleTurnExecutor(sampled, FakeChatCodec(), rewards)
    rollout = RolloutService(executor, max_concurrent=4, max_failures=max_failures, seed=1)
    run = Run(
        pipeline=None,  # type: ignore[arg-type]
        update=UpdateService(
            policy,
            None,
            aggregation=Aggregation.TOKEN_MEAN,
            max_length=3,
            batch_size=None,
            epochs=1,
            max_tokens=8,
            seed=0,
        ),
        engine=engine,
        policy=policy,
        channel=FakeWeightChannel(engine),
        sink=FakeMetricSink(),
        checkpoints=FakeCheckpointStore(root),
        prompts=prompts,
        rewards=rewards,
        clock=clock,
    )
    learner = RLLearner(
        experience=ExperienceService(
            policy,
            reference=FakeReference() if controller.coef else None,
            critic=None,
            algo=AlgoConfig(advantage=AdvantageSettings(estimator="rloo"), kl=KLSettings(init_coef=controller.coef)),
            reward=RewardConfig(),
            max_length=3,
            max_tokens=8,
            steps_per_rollout=1,
        ),
        update=run.update,
        policy=policy,
        channel=run.channel,
        objective=lambda **weights: PolicyLossObjective(),
        value_objective=None,
        kl=controller,
        entropy=EntropyController(coef=0.0),
        clock=clock,
    )
    plan = SamplingPlan(groups=GROUPS, samples=SAMPLES, in_flight=in_flight, group_filter=group_filter or GroupFilter())
    if bound is None:
        sampler = GroupSampler(rollout, prompts, params, plan, copy.deepcopy(curriculum))
        made: StepSource[RolloutGroup] = Alternating(
            learner=learner, sampler=sampler, sleeper=sleeper, steps=steps, clock=clock, resting=resting
        )
    else:
        plan = evolve(plan, in_flight=GROUPS * (bound.max_staleness + 1))
        stream = GroupStream(rollout, prompts, params, plan, bound, clock, copy.deepcopy(curriculum))
        made = Overlapping(learner=learner, stream=stream, engine=engine, pause=pause, clock=clock)
    run.pipeline = WholeRun(
        schedule=Schedule(
            steps=steps,
            eval_steps=eval_steps,
            save_steps=save_steps,
            state_steps=state_steps,
            state_minutes=state_minutes,
            state_in_background=state_in_background,
        ),
        steps=made,
        models=run.update,
        evaluation=EvaluationService(rollout, PROMPTS[:2], PARAMS, samples=1, threshold=0.5) if evaluation else None,
        sink=run.sink,
        sample_log=lambda step, groups: run.sampled.append((step, list(groups))),
        checkpoints=run.checkpoints,
        clock=clock,
        watch=LearningWatch(LearningSettings(steps=steps)),
        description={},
        less_memory="lower --train.max_tokens_per_micro_batch.",
    )
    return run
