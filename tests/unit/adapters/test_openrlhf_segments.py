"""Trajectories of agents that play whole episodes by themselves."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from rollgrad.adapters.openrlhf.executor import CustomAgentExecutor
from rollgrad.adapters.openrlhf.segments import EngineCall, read_segments, rewarded, to_trajectories
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.metrics import rollout_metrics
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward
from rollgrad.domain.episodes.routed import RoutedTokens
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.rollout_engine import FakeRolloutEngine

NONE = 255
REQUEST = EpisodeRequest(prompt=Prompt(token_ids=(1, 2), text="a"), params=SamplingParams(), group_id=0, sample_id=0)


def call(prompt: tuple[int, ...], tokens: list[int], *, start: int, experts: list[int]) -> EngineCall:
    routed = RoutedTokens(start=start, experts_RLK=torch.tensor(experts, dtype=torch.uint8)[:, None, None])
    nothing = [0] * len(tokens)
    generation = Generation(
        token_ids=tokens, logprobs=nothing, versions=nothing, stop_reason=StopReason.STOP, routed=(routed,)
    )
    return EngineCall(prompt=prompt, generation=generation)


def test_sampled_tokens_have_the_log_probs_of_the_request_before_them() -> None:
    def sampled(prompt: tuple[int, ...], *logprobs: float) -> EngineCall:
        generation = Generation(token_ids=(7, 0), logprobs=logprobs, versions=[0, 0], stop_reason=StopReason.STOP)
        return EngineCall(prompt=prompt, generation=generation)

    calls = [
        sampled((1, 2), -0.25, -0.5),  # an attempt that the agent dropped
        sampled((1, 2, 3), -4.0, -8.0),
    ]
    episode = {"observation_tokens": [1, 2, 3, 7, 0], "action_ranges": [(3, 5)], "reward": 1.0}
    (trajectory,) = to_trajectories(read_segments(episode, max_length=9), calls, REQUEST)
    assert trajectory.logprobs_T.tolist()[3:] == [-4.0, -8.0]


def test_what_any_part_of_an_episode_measured_is_the_episodes() -> None:
    """Metrics of a rollout are those of the first branch of each sample."""
    first = {"observation_tokens": [1, 2, 3], "action_ranges": [(2, 3)], "rollout_log_probs": [0.0, 0.0, -1.0]}
    parts = [first | {"extra_logs": {"calls": 2.0}}, first | {"extra_logs": {"calls": 3.0, "found": 1.0}}]
    segments = rewarded(read_segments(parts, max_length=9), Reward(value=1.0, metrics={"words": 4.0}))
    played = to_trajectories(segments, [], REQUEST)
    group = RolloutGroup(group_id=0, prompt=REQUEST.prompt, trajectories=tuple(played))
    metrics = rollout_metrics([group], pass_threshold=1.0)
    assert [metrics[f"reward/{name}"] for name in ("calls", "found", "words")] == [3.0, 1.0, 4.0]


async def test_requests_at_the_same_time_have_seeds_of_their_own() -> None:
    class Executor:
        async def execute(self, sampling_params: Any, llm_engine: Any, **others: Any) -> Any:
            await asyncio.gather(*(llm_engine.generate([1, 2], sampling_params) for _ in range(3)))
            await llm_engine.generate([1, 2], sampling_params)

    seeds = list[int]()

    class Engine(FakeRolloutEngine):
        async def generate(
            self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
        ) -> Generation:
            seeds.append(request.params.seed)
            await asyncio.sleep(0)
            return await super().generate(request, on_token=on_token)

    await CustomAgentExecutor(Executor(), Engine(), FakeChatCodec(), None, max_length=9).run(REQUEST)
    assert sorted(seeds) == [0, 1, 2, 3]


def test_tokens_have_the_experts_of_the_requests_that_they_were_part_of() -> None:
    calls = [
        call((1, 2), [3], start=0, experts=[7, 7]),
        call((9, 9, 9), [9], start=0, experts=[8, 8, 8]),  # of other tokens, such as a summary
        call((1, 2, 3, 4), [5], start=2, experts=[6, 6]),  # whose first tokens the engine had kept
    ]
    whole = {"observation_tokens": [1, 2, 3, 4, 5], "action_ranges": [(2, 3), (4, 5)], "reward": 1.0}
    for most, expected in ((5, [7, 7, 6, 6, NONE]), (3, [7, 7, NONE])):
        (trajectory,) = to_trajectories(read_segments(whole, max_length=most), calls, REQUEST)
        assert trajectory.experts_TLK is not None
        assert trajectory.experts_TLK.flatten().tolist() == expected
