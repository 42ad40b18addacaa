"""The asynchronous pipeline over fakes: bound, conservation, order, interruption and resuming, under any timing."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.pipelines.schedule import RunOutcome
from rollgrad.application.pipelines.step_source import uninterrupted
from rollgrad.application.rollouts.groups import RolloutService
from rollgrad.application.rollouts.sampler import SamplingPlan
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.control.staleness import StalenessBound, StalenessUnit, StalePolicy
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import CheckpointError, EngineError, NonFiniteUpdateError, NotApplicableError, RewardError
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.models import VOCABULARY, FakePolicy
from rollgrad.testing.prompt_source import FakePromptSource
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.fakes.pipeline import GROUPS, PARAMS, PROMPTS, SAMPLES, Run, make_run

LIMIT_SECONDS = 60.0
"""After which a run that does not end is a failure."""


def bound(steps: int = 3, max_staleness: int = 1, **settings: Any) -> StalenessBound:
    return StalenessBound(groups=GROUPS, updates=steps, max_staleness=max_staleness, **settings)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Run]:
    def make(*, steps: int = 3, max_staleness: int = 1, **settings: Any) -> Run:
        names = {"unit", "policy_of_stale"} & settings.keys()
        limits = {"policy" if name == "policy_of_stale" else name: settings.pop(name) for name in names}
        return make_run(tmp_path, steps=steps, bound=bound(steps, max_staleness, **limits), **settings)

    return make


async def train(run: Run) -> RunOutcome:
    async with asyncio.timeout(LIMIT_SECONDS):
        return await run.pipeline.run()


def trained_ids(run: Run) -> list[int]:
    return [int(i) for step in run.policy.updates for part in step for i in part.sample_ids_S]


def largest_lag(run: Run) -> int:
    """Over all trained tokens; the weights of update number i are those of version i."""
    return max(
        index - int(part.versions_N[part.action_mask_N].min())
        for index, step in enumerate(run.policy.updates)
        for part in step
    )


def dealt(run: Run) -> int:
    """Prompts that were ever taken from the stream."""
    return run.prompts.cursor.epoch * len(PROMPTS) + run.prompts.cursor.index


def assert_conserved(run: Run) -> None:
    state = run.pipeline.state_dict()
    assert dealt(run) == state["trained"] + sum(state["dropped"].values()) + len(state["pending"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    max_staleness=st.integers(0, 3),
    unit=st.sampled_from(StalenessUnit),
    policy=st.sampled_from(StalePolicy),
    pause=st.sampled_from(PauseMode),
    filtered=st.booleans(),
    seed=st.integers(0, 10**6),
)
async def test_under_any_timing_the_bound_holds_and_every_prompt_is_accounted_for(
    tmp_path: Path,
    max_staleness: int,
    unit: StalenessUnit,
    policy: StalePolicy,
    pause: PauseMode,
    filtered: bool,
    seed: int,
) -> None:
    chance = random.Random(seed)
    run = make_run(
        tmp_path,
        steps=5,
        bound=bound(5, max_staleness, unit=unit, policy=policy),
        pause=pause,
        group_filter=GroupFilter(score_range=(0.2, 0.8)) if filtered else None,
    )
    run.engine.latency = lambda request: chance.choice([0, 0, 1, 5, 60])
    assert (await train(run)).steps == 5
    ids = trained_ids(run)
    assert len(ids) == len(set(ids)) == 5 * GROUPS * SAMPLES
    assert largest_lag(run) <= max_staleness
    assert run.channel.versions == [0, 1, 2, 3, 4, 5]
    state = run.pipeline.state_dict()
    assert (state["trained"], state["pending"]) == (5 * GROUPS, [])
    assert_conserved(run)
    if policy is StalePolicy.WAIT or max_staleness == 0:
        assert state["dropped"].get("stale", 0) == 0
    assert max(metrics["staleness/max"] for metrics in run.steps) == largest_lag(run)


def timeless(run: Run) -> list[tuple[int, dict[str, float]]]:
    own = ("time/", "staleness/", "rollout/groups_in_flight")
    return [
        (step, {key: value for key, value in metrics.items() if not key.startswith(own)})
        for step, metrics in run.sink.records
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evaluation": True, "eval_steps": 2, "save_steps": 2},
        {"kl": KLController(coef=0.1, target=1e-6, horizon=100.0)},
        {"group_filter": GroupFilter(score_range=(0.2, 0.8))},
        {"curriculum": Curriculum(limits=(0.4, 0.6)), "group_filter": GroupFilter(score_range=(0.1, 0.9))},
    ],
    ids=["plain", "evaluation", "kl", "filter", "curriculum"],
)
async def test_without_staleness_it_is_the_synchronous_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = make_run(tmp_path, steps=6, bound=bound(6, 0), **settings)
    theirs = make_run(tmp_path, steps=6, **settings)
    assert await train(ours) == await train(theirs)
    assert torch.equal(ours.policy.state_dict()["table"], theirs.policy.state_dict()["table"])
    assert timeless(ours) == timeless(theirs)
    assert trained_ids(ours) == trained_ids(theirs)
    assert ours.checkpoints.models == theirs.checkpoints.models
    assert dealt(ours) == dealt(theirs)


class SlowPolicy(FakePolicy):
    """Each update, when it has computed, waits until `enough` says so, or a deadline has passed."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        super().__init__(torch.linspace(-0.5, 0.5, VOCABULARY))
        self._enough = enough
        self._never = threading.Event()

    def update(self, micro_batches: Any, objective: Any) -> dict[str, float]:
        metrics = super().update(micro_batches, objective)
        for _ in range(2000):
            if self._enough():
                break
            self._never.wait(0.005)
        return metrics


async def test_groups_are_played_while_the_update_runs(build: Callable[..., Run]) -> None:
    runs: list[Run] = []
    policy = SlowPolicy(lambda: len(runs[0].rewards.requests) == min(len(policy.updates) + 1, 4) * GROUPS * SAMPLES)
    runs.append(build(steps=4, policy=policy))
    await train(runs[0])
    assert [metrics["staleness/mean"] for metrics in runs[0].steps] == [0.0, 1.0, 1.0, 1.0]
    assert [metrics["staleness/share_lag_1"] for metrics in runs[0].steps] == [0.0, 1.0, 1.0, 1.0]
    assert [metrics["rollout/kept_for_next"] for metrics in runs[0].steps][1:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pause", "versions"), [(PauseMode.WAIT, 1), (PauseMode.KEEP, 2), (PauseMode.ABORT, 2)], ids=str
)
async def test_what_is_in_flight_when_the_weights_change(
    tmp_path: Path, build: Callable[..., Run], pause: PauseMode, versions: int
) -> None:
    """One prompt's samples are still being drawn when the first update ends."""
    updating, asked = threading.Event(), Counter[int]()

    def some_are_drawn() -> bool:
        updating.set()
        return max(asked.values(), default=0) > 1

    params = evolve(PARAMS, max_new_tokens=40)
    run = build(steps=2, policy=SlowPolicy(some_are_drawn), pause=pause, params=params)
    generate = run.engine.generate

    def latency(request: GenerationRequest) -> int:
        """Asked before each token."""
        asked[id(request)] += request.prompt_token_ids[0] == 4
        return 4000 if request.prompt_token_ids[0] == 4 else 0

    async def held(request: GenerationRequest, **options: Any) -> Generation:
        while request.prompt_token_ids[0] == 4 and not updating.is_set():
            await asyncio.sleep(0)
        return await generate(request, **options)

    run.engine.latency, run.engine.generate = latency, held  # type: ignore[method-assign]
    alone = make_run(tmp_path, steps=2, params=params)
    for one in (run, alone):
        await train(one)

    def played(one: Run) -> list[Trajectory]:
        return [t for _, groups in one.sampled for group in groups for t in group.trajectories]

    assert max(len(set(t.versions_T[t.versions_T >= 0].tolist())) for t in played(run)) == versions
    tokens, expected = ({t.sample_id: t.token_ids_T.tolist() for t in played(one)} for one in (run, alone))
    assert tokens == expected, "this engine's tokens do not depend on its weights: a continued reply is the whole one"


async def test_slow_groups_are_dropped_and_replaced(build: Callable[..., Run]) -> None:
    run = build(steps=6, policy_of_stale=StalePolicy.DROP, pause=PauseMode.KEEP)
    slow = iter([0] * SAMPLES)
    delays: dict[tuple[int, ...], int] = {}

    def latency(request: Any) -> int:
        key = (request.params.seed, *request.prompt_token_ids)
        if key not in delays:
            delays[key] = 10**7 if next(slow, None) == 0 else 0
        return delays[key]

    run.engine.latency = latency
    await train(run)
    state = run.pipeline.state_dict()
    assert state["dropped"] == {"stale": 1}
    assert sum(metrics.get("rollout/rejected_stale", 0.0) for metrics in run.steps) == 1.0
    assert not set(range(SAMPLES)) & set(trained_ids(run)), "group 0 never came to its end"
    assert_conserved(run)


async def test_failed_groups_are_replaced_and_counted(build: Callable[..., Run]) -> None:
    calls = itertools.count()
    run = build(steps=3, max_failures=3, value=lambda request: float("nan") if next(calls) < 3 else 0.5)
    run.engine.latency = lambda request: 0 if request.prompt_token_ids == (1,) else 50
    await train(run)
    state = run.pipeline.state_dict()
    assert (state["trained"], state["dropped"]) == (6, {"empty": 1})
    assert sum(metrics.get("rollout/rejected_empty", 0.0) for metrics in run.steps) == 1.0
    assert_conserved(run)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"value": lambda request: float("nan")}, RewardError, "finite"),
        (
            {"value": lambda request: float("nan"), "max_failures": 20},
            RewardError,
            r"and 20 may \(--rollout.max_failures\)",
        ),
        ({"policy": FakePolicy(torch.full((VOCABULARY,), float("nan")))}, NonFiniteUpdateError, "loss"),
        ({"value": lambda request: 1.0, "group_filter": GroupFilter(score_range=(0.0, 1.0))}, RewardError, "budget"),
    ],
    ids=["reward", "many", "update", "budget"],
)
async def test_a_failure_ends_the_run_and_what_is_in_flight(
    build: Callable[..., Run], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    run = build(steps=5, **settings)

    async with asyncio.timeout(LIMIT_SECONDS):
        with pytest.raises(error, match=message):
            await run.pipeline.run()
    assert len(asyncio.all_tasks()) == 1
    assert run.checkpoints.models == []


async def test_a_run_whose_replies_no_reward_applies_to_ends(build: Callable[..., Run]) -> None:
    def value(request: RewardRequest) -> float:
        raise NotApplicableError("reward_func returned None for reply 0: no reward applies to it.")

    run = build(value=value)
    with pytest.raises(RewardError, match=r"19 of 19 prompts .* no episode to train on .*: reward_func returned None"):
        await train(run)


async def test_groups_that_fail_during_an_update_are_played_again_by_a_resumed_run() -> None:
    def value(request: RewardRequest) -> float:
        return 0.5 if request.label < GROUPS else float("nan")

    engine = FakeRolloutEngine()
    engine.latency = lambda request: 0 if request.prompt_token_ids[0] <= GROUPS else 50
    executor = SingleTurnExecutor(engine, FakeChatCodec(), FakeRewardSource(value))
    rollout = RolloutService(executor, max_concurrent=4 * GROUPS * SAMPLES, max_failures=0)
    plan = SamplingPlan(groups=GROUPS, samples=SAMPLES, in_flight=2 * GROUPS)
    stream = GroupStream(rollout, FakePromptSource(PROMPTS), PARAMS, plan, bound(), FakeClock())
    trained = [group.group_id for group in (await stream.take())[0]]
    for _ in range(1000):
        await asyncio.sleep(0)
    stream.updated()
    with pytest.raises(RewardError, match="finite"):
        await stream.take()
    state = stream.state_dict()
    assert trained + [pending["group"] for pending in state["pending"]] == list(range(state["next_group"]))


async def test_an_engine_that_fails_ends_the_run(build: Callable[..., Run]) -> None:
    run = build(steps=50)
    run.engine.fail_with = "out of memory"
    with pytest.raises(EngineError, match="out of memory"):
        await train(run)


async def test_a_channel_that_fails_leaves_the_engine_running(
    build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(steps=5)

    async def broken(policy: PolicyModel, version: int) -> dict[str, float]:
        if version:
            raise EngineError("The engine did not take the weights.")
        return {"seconds": 0.0, "bytes": 0.0}

    monkeypatch.setattr(run.channel, "push", broken)
    resumed: list[bool] = []
    resume = run.engine.resume

    async def counted() -> None:
        resumed.append(True)
        await resume()

    monkeypatch.setattr(run.engine, "resume", counted)
    with pytest.raises(EngineError, match="did not take"):
        await train(run)
    assert resumed == [True]


@pytest.mark.parametrize("pause", PauseMode)
async def test_an_interruption_saves_the_last_finished_step(build: Callable[..., Run], pause: PauseMode) -> None:
    run = build(steps=1000, max_staleness=2, pause=pause, state_steps=5)

    task = asyncio.create_task(run.pipeline.run())
    while len(run.steps) < 3:
        await asyncio.sleep(0)
    task.cancel()
    outcome = await task
    assert len(asyncio.all_tasks()) == 1, "no episode goes on"
    assert outcome.interrupted
    assert 3 <= outcome.steps < 1000
    assert outcome.steps == len(run.policy.updates) == len(run.steps)
    assert run.checkpoints.models == ["model"]
    assert run.checkpoints.states["model"]["step"] == outcome.steps
    assert_conserved(run)


async def test_an_update_that_has_begun_is_finished_and_counted(build: Callable[..., Run]) -> None:
    runs: list[Run] = []
    tasks: list[asyncio.Task[RunOutcome]] = []
    cancelled = threading.Event()
    runs.append(build(steps=9, state_steps=9, policy=SlowPolicy(cancelled.is_set)))
    (run,) = runs

    tasks.append(asyncio.create_task(run.pipeline.run()))
    while len(run.rewards.requests) < 2 * GROUPS * SAMPLES:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    cancelled.set()
    outcome = await tasks[0]
    assert (outcome.interrupted, outcome.steps, len(run.policy.updates)) == (True, 1, 1)
    assert run.checkpoints.training is not None
    state = run.checkpoints.training["run"]
    assert (state["step"], state["trained"], len(state["pending"])) == (1, GROUPS, GROUPS)
    assert_conserved(run)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_an_interrupted_run_plays_again_what_was_in_flight(tmp_path: Path, max_staleness: int) -> None:
    def make(steps: int) -> Run:
        return make_run(tmp_path, steps=steps, state_steps=1, bound=bound(8, max_staleness))

    first = make(8)

    task = asyncio.create_task(first.pipeline.run())
    while len(first.steps) < 3:
        await asyncio.sleep(0)
    task.cancel()
    await task
    state = first.checkpoints.training
    assert state is not None
    second = make(8)
    second.pipeline.resume(state)
    assert second.pipeline.state_dict() == state["run"]
    assert (await train(second)).steps == 8
    assert second.channel.versions[0] == state["run"]["step"]
    trained = trained_ids(first) + trained_ids(second)
    assert sorted(trained) == list(range(8 * GROUPS * SAMPLES)), "nothing is lost or trained on twice"
    assert largest_lag(second) - state["run"]["step"] <= max_staleness
    assert_conserved(second)
    if max_staleness == 0:
        whole = make(8)
        await train(whole)
        assert torch.equal(whole.policy.state_dict()["table"], second.policy.state_dict()["table"])


async def test_a_state_with_groups_in_flight_is_none_of_a_synchronous_run(
    tmp_path: Path, build: Callable[..., Run]
) -> None:
    run = make_run(tmp_path, steps=3, bound=bound(3, 1))
    await train(run)
    state = run.pipeline.training_state()
    state["run"]["pending"] = [{"group": 5, "position": {}}]
    with pytest.raises(CheckpointError, match=r"train\.async_enable"):
        make_run(tmp_path, steps=3).pipeline.resume(state)


async def test_idle_shares_are_measured_by_the_clock(build: Callable[..., Run]) -> None:
    runs: list[Run] = []

    def a_second_each(request: RewardRequest) -> float:
        runs[0].clock.advance(1.0)
        return 0.5

    runs.append(build(steps=1, value=a_second_each))
    await train(runs[0])
    (metrics,) = runs[0].steps
    assert metrics["time/generate_s"] == metrics["time/step_s"] == pytest.approx(GROUPS * SAMPLES)
    assert metrics["time/trainer_idle_share"] == 1.0
    assert metrics["time/generation_idle_share"] == 0.0


async def test_work_that_is_not_to_be_interrupted_tells_its_caller() -> None:
    released = asyncio.Event()

    async def work() -> str:
        await released.wait()
        return "result"

    task = asyncio.create_task(uninterrupted(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    released.set()
    assert await task == ("result", True)
    assert await uninterrupted(work()) == ("result", False)
