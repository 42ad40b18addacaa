"""Prompt in, one action, one reward."""

import asyncio

import pytest

from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RewardRequest, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine

REQUEST = EpisodeRequest(
    prompt=Prompt(token_ids=(72, 105), text="Hi", label="there"),
    params=SamplingParams(max_new_tokens=6, seed=4),
    group_id=2,
    sample_id=9,
)


async def play(engine: FakeRolloutEngine, rewards: FakeRewardSource) -> list[Trajectory] | RolloutFailure:
    return await SingleTurnExecutor(engine, FakeChatCodec(), rewards).run(REQUEST)


async def test_tokens_are_those_the_engine_sampled_and_the_reward_sees_their_text() -> None:
    engine, rewards = FakeRolloutEngine(), FakeRewardSource(lambda request: 0.25)
    engine.version = 3
    sampled = await engine.generate(GenerationRequest(prompt_token_ids=(72, 105), params=REQUEST.params))
    result = await play(engine, rewards)
    assert isinstance(result, list)
    (trajectory,) = result
    assert trajectory.token_ids_T.tolist() == [72, 105, *sampled.token_ids]
    assert trajectory.versions_T.tolist() == [-1, -1, *[3] * 6]
    assert trajectory.logprobs_T[2:].tolist() == pytest.approx(list(sampled.logprobs))
    assert trajectory.reward == trajectory.score == 0.25
    assert trajectory.stop_reason is StopReason.LENGTH
    (judged,) = rewards.requests
    assert judged.response == FakeChatCodec().decode(sampled.token_ids)
    assert judged.label == "there"
    assert judged.query == "Hi" + judged.response
    assert judged.token_ids == (72, 105, *sampled.token_ids)
    assert judged.step == 3, "updates behind the policy that wrote it"
    assert engine.requests[-1].params == REQUEST.params


async def test_a_reward_that_breaks_is_a_failure_of_the_episode() -> None:
    result = await play(FakeRolloutEngine(), FakeRewardSource(lambda request: float("nan")))
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.REWARD


async def test_an_engine_that_breaks_is_a_failure_of_the_episode() -> None:
    engine = FakeRolloutEngine()
    engine.fail_with = "out of memory"
    result = await play(engine, FakeRewardSource())
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.INFRASTRUCTURE
    assert "out of memory" in result.message


async def test_a_request_aborted_before_its_first_token_is_a_failure_of_the_episode() -> None:
    engine, rewards = FakeRolloutEngine(), FakeRewardSource()

    await engine.pause(PauseMode.KEEP)
    task = asyncio.create_task(SingleTurnExecutor(engine, FakeChatCodec(), rewards).run(REQUEST))
    await asyncio.sleep(0)
    await engine.pause(PauseMode.ABORT)
    result = await task
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.INFRASTRUCTURE
    assert "before its first token" in result.message
    assert not rewards.requests


async def test_a_misconfiguration_is_raised() -> None:
    class Refuses(FakeRolloutEngine):
        async def generate(self, request: GenerationRequest, **listener: object) -> Generation:
            raise ConfigurationError("too many tokens")

    with pytest.raises(ConfigurationError, match="too many tokens"):
        await play(Refuses(), FakeRewardSource())


async def test_a_wrong_number_of_rewards_does_not_pass_unseen() -> None:
    class TwoForOne(FakeRewardSource):
        async def score(self, requests: list[RewardRequest]) -> list:  # type: ignore[override, type-arg]
            return [*await super().score(requests), *await super().score(requests)]

    result = await play(FakeRolloutEngine(), TwoForOne())
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.REWARD
    assert "too many values" in result.message


@pytest.mark.parametrize("error", [SystemExit(0), StopIteration(), MemoryError(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize(
    ("place", "name", "kind"),
    [
        (FakeRolloutEngine, "generate", FailureKind.INFRASTRUCTURE),
        (FakeChatCodec, "decode", FailureKind.INFRASTRUCTURE),
        (FakeRewardSource, "score", FailureKind.REWARD),
    ],
)
async def test_whatever_is_raised_costs_this_episode_alone(
    place: type, name: str, kind: FailureKind, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(place, name, broken)
    result = await play(FakeRolloutEngine(), FakeRewardSource())
    assert isinstance(result, RolloutFailure)
    assert result.kind is kind
    assert type(error).__name__ in result.message


@pytest.mark.parametrize(("max_tokens", "length"), [(None, 6), (20, 6), (8, 6), (7, 5), (3, 1)])
async def test_a_reply_gets_what_the_prompt_leaves(max_tokens: int | None, length: int) -> None:
    executor = SingleTurnExecutor(FakeRolloutEngine(), FakeChatCodec(), FakeRewardSource(), max_tokens=max_tokens)
    result = await executor.run(REQUEST)
    assert isinstance(result, list)
    assert result[0].action_length == length


async def test_a_prompt_that_leaves_nothing_is_a_failure_of_the_data() -> None:
    executor = SingleTurnExecutor(FakeRolloutEngine(), FakeChatCodec(), FakeRewardSource(), max_tokens=2)
    result = await executor.run(REQUEST)
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.DATA
    assert "--data.max_len" in result.message
