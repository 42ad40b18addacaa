"""Promises of every agent executor."""

import asyncio
from collections.abc import Callable

import pytest

from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import SegmentKind
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.testing.agent_executor import FakeAgentExecutor
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine


def request(sample_id: int = 6, group_id: int = 3) -> EpisodeRequest:
    return EpisodeRequest(
        prompt=Prompt(token_ids=(72, 105), text="Hi"),
        params=SamplingParams(max_new_tokens=5, seed=sample_id),
        group_id=group_id,
        sample_id=sample_id,
    )


def single_turn(engine: FakeRolloutEngine) -> AgentExecutor:
    return SingleTurnExecutor(engine, FakeChatCodec(), FakeRewardSource(lambda request: 0.5))


@pytest.fixture(params=["fake", "single_turn"])
def make(request: pytest.FixtureRequest) -> Callable[[], AgentExecutor]:
    return FakeAgentExecutor if request.param == "fake" else lambda: single_turn(FakeRolloutEngine())


@pytest.fixture(params=["fake", "single_turn"])
def failing(request: pytest.FixtureRequest) -> AgentExecutor:
    if request.param == "fake":
        return FakeAgentExecutor(
            lambda r: RolloutFailure(
                kind=FailureKind.INFRASTRUCTURE, message="the engine broke", group_id=r.group_id, sample_id=r.sample_id
            )
        )
    engine = FakeRolloutEngine()
    engine.fail_with = "the engine broke"
    return single_turn(engine)


async def test_trajectories_carry_the_requests_ids_and_prompt(make: Callable[[], AgentExecutor]) -> None:
    executor = make()
    assert isinstance(executor, AgentExecutor)
    result = await executor.run(request())
    assert isinstance(result, list)
    assert result
    for trajectory in result:
        assert (trajectory.group_id, trajectory.sample_id) == (3, 6)
        assert trajectory.segments[0].kind is SegmentKind.PROMPT
        assert trajectory.token_ids_T[: trajectory.prompt_length].tolist() == [72, 105]
        assert trajectory.action_length > 0


async def test_episodes_may_overlap(make: Callable[[], AgentExecutor]) -> None:
    executor = make()
    results = await asyncio.gather(*(executor.run(request(sample_id=n)) for n in range(10)))
    assert ([trajectory.sample_id for result in results if isinstance(result, list) for trajectory in result]) == list(
        range(10)
    )


async def test_a_failure_of_the_episode_is_a_value(failing: AgentExecutor) -> None:
    result = await failing.run(request())
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.INFRASTRUCTURE
    assert "the engine broke" in result.message
    assert (result.group_id, result.sample_id) == (3, 6)
