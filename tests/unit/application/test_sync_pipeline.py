"""The synchronous pipeline over fakes: order, counts, versions, schedule, interruption."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollgrad.application.pipelines.schedule import RunOutcome
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.episodes.generation import GenerationRequest
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import NonFiniteUpdateError, RewardError
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.models import VOCABULARY, FakePolicy
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.fakes.pipeline import GROUPS, PARAMS, SAMPLES, Run, make_run


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Run]:
    return partial(make_run, tmp_path)


def test_prompts_submitted_are_prompts_trained(build: Callable[..., Run]) -> None:
    run = build(steps=4)
    outcome = run.train()
    assert outcome == RunOutcome(steps=4)
    taken = [group.prompt.text for _, groups in run.sampled for group in groups]
    assert taken == ["0", "1", "2", "3", "4", "0", "1", "2"], "the stream wraps, nothing is skipped or repeated"
    trained = [int(i) for step in run.policy.updates for part in step for i in part.sample_ids_S]
    assert trained == list(range(4 * 2 * 3))
    assert [metrics["rollout/samples"] for metrics in run.steps] == [6.0] * 4
    assert len(run.rewards.requests) == 24


def test_every_rollout_comes_from_the_weights_before_it(build: Callable[..., Run]) -> None:
    run = build(steps=3)
    run.train()
    assert run.channel.versions == [0, 1, 2, 3]
    for index, step in enumerate(run.policy.updates):
        for part in step:
            assert set(part.versions_N[part.action_mask_N].tolist()) == {index}


@pytest.mark.parametrize(
    ("every", "expected"), [(-1, [0, 5]), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (7, [0, 5])]
)
def test_evaluations_come_at_the_ends_and_every_so_many_steps(
    build: Callable[..., Run], every: int, expected: list[int]
) -> None:
    run = build(steps=5, eval_steps=every, evaluation=True)
    outcome = run.train()
    assert [step for step, metrics in run.sink.records if "eval/pass@1" in metrics] == expected
    assert outcome.before.keys() == outcome.after.keys() != set()


@pytest.mark.parametrize(("every", "expected"), [(-1, ["model"]), (2, ["step_2", "step_4", "model"]), (5, ["model"])])
def test_checkpoints_are_named_by_step_and_come_with_state(
    build: Callable[..., Run], every: int, expected: list[str]
) -> None:
    run = build(steps=5, save_steps=every)
    run.train()
    assert run.checkpoints.models == list(run.checkpoints.states) == expected
    assert run.checkpoints.states["model"]["step"] == 5
    assert run.checkpoints.states["model"]["prompts"] == run.prompts.state_dict()
    if "step_2" in expected:
        assert run.checkpoints.states["step_2"]["step"] == 2


def test_the_kl_weight_adapts_and_is_logged_and_saved(build: Callable[..., Run]) -> None:
    run = build(steps=3, kl=KLController(coef=0.1, target=1e-6, horizon=100.0))
    run.train()
    coefs = [metrics["policy/kl_coef"] for metrics in run.steps]
    controller = KLController(coef=0.1, target=1e-6, horizon=100.0)
    for metrics, coef in zip(run.steps, coefs, strict=True):
        assert coef == pytest.approx(controller.coef)
        controller = controller.update(metrics["policy/ref_kl"], 6)
    assert coefs[0] == 0.1
    assert len(set(coefs)) == 3
    assert run.checkpoints.states["model"]["kl"] == {"coef": pytest.approx(controller.coef)}


def test_training_raises_the_reward(build: Callable[..., Run]) -> None:
    run = build(steps=2)
    before = run.policy.state_dict()["table"]
    run.train()
    assert not torch.equal(before, run.policy.state_dict()["table"])
    assert run.policy.state_dict()["steps"] == 2


def test_failures_are_counted_by_kind_and_the_rest_is_trained(build: Callable[..., Run]) -> None:
    calls: list[int] = []

    def third_fails(request: RewardRequest) -> float:
        calls.append(1)
        return float("nan") if len(calls) == 3 else 1.0

    run = build(steps=2, max_failures=1, value=third_fails)
    run.train()
    first, second = run.steps
    assert (first["rollout/samples"], first["rollout/failed_reward"]) == (5.0, 1.0)
    assert second["rollout/samples"] == 6.0
    assert "rollout/failed_reward" not in second


def test_a_rollout_without_a_single_success_ends_the_run(build: Callable[..., Run]) -> None:
    run = build(max_failures=100, value=lambda request: float("nan"))
    with pytest.raises(RewardError, match="2 of 2 prompts that were played have no episode to train on"):
        run.train()


def test_a_failed_update_ends_the_run(build: Callable[..., Run]) -> None:
    run = build(policy=FakePolicy(torch.full((VOCABULARY,), float("nan"))))
    with pytest.raises(NonFiniteUpdateError):
        run.train()
    assert run.channel.versions == [0]


@pytest.mark.parametrize("changed", [torch.bfloat16, torch.float64])
def test_a_reward_that_changes_torch_s_number_format_changes_nothing_learned(
    build: Callable[..., Run], changed: torch.dtype
) -> None:
    """As code does that loads a model of its own."""

    def value(request: RewardRequest) -> float:
        if called[0]:
            torch.set_default_dtype(changed)
        return len(request.response) / 7

    before, learned = torch.get_default_dtype(), []
    try:
        for called in ([False], [True]):
            run = build(steps=2)
            run.rewards._value = value
            with capture_logs() as logs:
                run.train()
            learned.append([{k: v for k, v in step.items() if not k.startswith("time/")} for step in run.steps])
            told = [log for log in logs if "torch.set_default_dtype" in log["event"]]
            assert [log["changed_to"] for log in told] == [str(changed)] * (2 if called[0] else 0)
    finally:
        torch.set_default_dtype(before)
    assert learned[0] == learned[1]


async def test_an_interruption_saves_the_last_finished_step(build: Callable[..., Run]) -> None:
    run = build(steps=1000)

    task = asyncio.create_task(run.pipeline.run())
    while len(run.steps) < 3:
        await asyncio.sleep(0)
    task.cancel()
    outcome = await task
    assert outcome.interrupted
    assert 3 <= outcome.steps < 1000
    assert run.checkpoints.models == ["model"]
    assert run.checkpoints.states["model"]["step"] == outcome.steps == run.channel.versions[-1]


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_run_that_may_be_killed_saves_first_what_it_goes_on_from(
    build: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    run = build(steps=1000 if interrupted else 2, state_minutes=1e9)
    save, models = run.checkpoints.save_training, []

    def watched(saved: Any) -> Any:
        models.append(list(run.checkpoints.models))
        return save(saved)

    monkeypatch.setattr(run.checkpoints, "save_training", watched)
    task = asyncio.create_task(run.pipeline.run())
    while len(run.steps) < 2:
        await asyncio.sleep(0)
    if interrupted:
        task.cancel()
    assert (await task).interrupted is interrupted
    assert models == [[] if interrupted else ["model"]]
    assert run.checkpoints.models == ["model"]


class WaitingPolicy(FakePolicy):
    """Updates only after the event loop has answered it."""

    def __init__(self) -> None:
        super().__init__(torch.linspace(-0.5, 0.5, VOCABULARY))
        self.asks, self.answered = threading.Event(), threading.Event()

    def update(self, micro_batches: Any, objective: Any) -> dict[str, float]:
        self.asks.set()
        assert self.answered.wait(60), "the event loop waits for the update"
        return super().update(micro_batches, objective)


@pytest.mark.parametrize("interrupted", [False, True])
async def test_the_event_loop_goes_on_while_the_update_runs(build: Callable[..., Run], interrupted: bool) -> None:
    """An update that has begun is finished and counted, and saved with its state."""
    policy = WaitingPolicy()
    run = build(steps=2, state_steps=2, policy=policy)

    task = asyncio.create_task(run.pipeline.run())
    while not policy.asks.is_set():
        await asyncio.sleep(0)
    if interrupted:
        task.cancel()
        await asyncio.sleep(0)
    policy.answered.set()
    outcome = await task
    steps = 1 if interrupted else 2
    assert (outcome.interrupted, outcome.steps, len(policy.updates)) == (interrupted, steps, steps)
    assert run.checkpoints.training is not None
    assert run.checkpoints.training["run"]["step"] == steps
    resumed = build(steps=2)
    resumed.pipeline.resume(run.checkpoints.training)
    await resumed.pipeline.run()
    trained = [int(i) for made in (run, resumed) for step in made.policy.updates for p in step for i in p.sample_ids_S]
    assert trained == list(range(2 * GROUPS * SAMPLES))


class SlowlyWakingEngine(FakeRolloutEngine):
    """Other coroutines run before the caller of `wake` goes on, as with an engine in another process."""

    async def wake(self) -> None:
        await super().wake()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_requests_that_come_while_the_engine_sleeps_wait_for_the_new_weights(build: Callable[..., Run]) -> None:
    policy, engine = WaitingPolicy(), SlowlyWakingEngine()
    run = build(steps=1, policy=policy, sleeper=engine)

    task = asyncio.create_task(run.pipeline.run())
    while not policy.asks.is_set():
        await asyncio.sleep(0)
    asked = asyncio.create_task(engine.generate(GenerationRequest(prompt_token_ids=(1,), params=PARAMS)))
    await asyncio.sleep(0)
    policy.answered.set()
    outcome, reply = await task, await asked
    assert outcome.steps == 1
    assert set(reply.versions) == {1}


async def test_optimizers_sleep_after_each_update_before_the_engine_takes_its_memory(build: Callable[..., Run]) -> None:
    events: list[str] = []

    class Policy(FakePolicy):
        def update(self, *arguments: Any) -> dict[str, float]:
            events.append("update")
            return super().update(*arguments)

        def sleep(self) -> None:
            events.append("optimizer sleeps")

    class Engine(FakeRolloutEngine):
        async def sleep(self) -> None:
            events.append("engine sleeps")
            await super().sleep()

        async def wake(self) -> None:
            events.append("engine wakes")
            await super().wake()

    policy = Policy()
    run = build(steps=2, policy=policy, sleeper=Engine(), resting=[policy])
    await run.pipeline.run()
    assert events == ["engine sleeps", "update", "optimizer sleeps", "engine wakes"] * 2


async def test_an_interruption_before_the_first_step_still_saves(build: Callable[..., Run]) -> None:
    run = build(evaluation=True)

    task = asyncio.create_task(run.pipeline.run())
    await asyncio.sleep(0)
    task.cancel()
    outcome = await task
    assert (outcome.interrupted, outcome.steps, outcome.before) == (True, 0, {})
    assert run.checkpoints.models == ["model"]


def test_times_are_those_of_the_clock(build: Callable[..., Run]) -> None:
    clocks: list[FakeClock] = []

    def a_second_each(request: RewardRequest) -> float:
        clocks[0].advance(1.0)
        return 1.0

    run = build(steps=1, value=a_second_each)
    clocks.append(run.clock)
    run.train()
    (metrics,) = run.steps
    assert metrics["time/generate_s"] == pytest.approx(6.0)
    assert metrics["time/step_s"] == pytest.approx(6.0)
    assert metrics["time/update_s"] == metrics["time/sync_s"] == metrics["time/experience_s"] == 0.0


def test_step_metrics_describe_the_rollout(build: Callable[..., Run]) -> None:
    run = build(steps=1)
    run.train()
    (metrics,) = run.steps
    (_, groups) = run.sampled[0]
    rewards = [t.reward for g in groups for t in g.trajectories]
    assert metrics["reward/mean"] == metrics["reward/score_mean"] == pytest.approx(sum(rewards) / 6)
    assert metrics["rollout/response_length_mean"] == metrics["rollout/response_length_max"] == 3.0
    assert metrics["rollout/truncated_share"] == 1.0
    flat = sum(len({t.score for t in g.trajectories}) == 1 for g in groups) / 2
    assert metrics["rollout/zero_spread_share"] == flat
