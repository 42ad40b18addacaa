"""Trajectories of agents that play whole episodes by themselves."""

import torch

from rollgrad.adapters.openrlhf.segments import EngineCall, read_segments, to_trajectories
from rollgrad.domain.episodes.generation import Generation, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.routed import RoutedTokens
from rollgrad.domain.ports.agent_executor import EpisodeRequest

NONE = 255


def call(prompt: tuple[int, ...], tokens: list[int], *, start: int, experts: list[int]) -> EngineCall:
    routed = RoutedTokens(start=start, experts_RLK=torch.tensor(experts, dtype=torch.uint8)[:, None, None])
    nothing = [0] * len(tokens)
    generation = Generation(
        token_ids=tokens, logprobs=nothing, versions=nothing, stop_reason=StopReason.STOP, routed=(routed,)
    )
    return EngineCall(prompt=prompt, generation=generation)


def test_tokens_have_the_experts_of_the_requests_that_they_were_part_of() -> None:
    calls = [
        call((1, 2), [3], start=0, experts=[7, 7]),
        call((9, 9, 9), [9], start=0, experts=[8, 8, 8]),  # of other tokens, such as a summary
        call((1, 2, 3, 4), [5], start=2, experts=[6, 6]),  # whose first tokens the engine had kept
    ]
    whole = {"observation_tokens": [1, 2, 3, 4, 5], "action_ranges": [(2, 3), (4, 5)], "reward": 1.0}
    prompt = Prompt(token_ids=(1, 2), text="a")
    request = EpisodeRequest(prompt=prompt, params=SamplingParams(), group_id=0, sample_id=0)
    for most, expected in ((5, [7, 7, 6, 6, NONE]), (3, [7, 7, NONE])):
        (trajectory,) = to_trajectories(read_segments(whole, max_length=most), calls, request)
        assert trajectory.experts_TLK is not None
        assert trajectory.experts_TLK.flatten().tolist() == expected
