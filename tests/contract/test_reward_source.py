"""Promises of every reward source."""

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.rewards.judge import JudgePrompt, LLMJudge
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardInput, RewardRequest
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.testing.reward_source import FakeRewardSource
from tests.fakes.reward_server import JsonServer, RewardServer


def ask(response: str, label: Any = "7") -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text=f"What makes {label}? ", label=label)
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


def plain(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    return [float(q.removeprefix(p) == y) for q, p, y in zip(queries, prompts, labels, strict=True)]


def judge(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
    """A reward model, which knows no label."""
    words = [re.findall("[0-9]+", reply.text) for reply in replies]
    return [(float(asked == answer), False) for asked, answer in words]


def opinion(path: str, body: Any) -> tuple[int, Any]:
    """A language model that compares the two numbers of the question."""
    asked, answer = re.findall("[0-9]+", body["messages"][0]["content"])
    return 200, {"choices": [{"message": {"content": f"It is worth {float(asked == answer)}"}}]}


def trl(completions: list[Any], prompts: list[Any], **columns: Any) -> list[float]:
    assert all(isinstance(completion, str) for completion in completions)
    return [float(text == label) for text, label in zip(completions, columns["labels"], strict=True)]


async def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth)}


async def asynchronous(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"rewards": plain(queries, prompts, labels)}


FUNCTIONS = {"function": plain, "async_function": None, "trl": trl, "verl": compute_score}


@pytest.fixture(params=["fake", *FUNCTIONS, "exact_match", "last_number", "http", "judge", "model"])
def source(request: pytest.FixtureRequest) -> Iterator[RewardSource]:
    if request.param == "http":
        server = RewardServer(lambda body: (200, {"rewards": plain(body["query"], body["prompts"], body["labels"])}))
        yield HttpReward([server.url], timeout=120.0)
        server.close()
    elif request.param == "judge":
        judge_server = JsonServer(opinion)
        prompt = JudgePrompt("{query}", "judge.txt")
        yield LLMJudge([f"{judge_server.url}/v1"], model="judge", prompt=prompt, timeout=120.0)
        judge_server.close()
    elif request.param == "fake":
        yield FakeRewardSource()
    elif request.param == "model":
        yield ModelReward([judge, judge], timeout=120.0)
    elif request.param in FUNCTIONS:
        yield FunctionReward(FUNCTIONS[request.param] or asynchronous, timeout=120.0)
    else:
        yield VerifierReward(Verifier(request.param), timeout=120.0)


@pytest.fixture(params=["fake", "function", "model"])
def nan_source(request: pytest.FixtureRequest) -> RewardSource:
    return {
        "fake": FakeRewardSource(lambda request: math.nan),
        "function": FunctionReward(lambda q, p, y: [math.nan] * len(q), timeout=120.0),
        "model": ModelReward([lambda texts: [(math.nan, False) for _ in texts]], timeout=120.0),
    }[request.param]


async def test_one_reward_a_request_in_order(source: RewardSource) -> None:
    assert isinstance(source, RewardSource)
    rewards = await source.score([ask("7"), ask("8"), ask("9", label="9")])
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0]


async def test_scoring_twice_gives_the_same(source: RewardSource) -> None:
    requests = [ask("7"), ask("1")]
    assert await source.score(requests) == await source.score(requests)


async def test_calls_may_overlap(source: RewardSource) -> None:
    async def overlap() -> list[float]:
        answers = await asyncio.gather(*(source.score([ask(str(n))]) for n in range(20)))
        return [answer[0].value for answer in answers]

    assert await overlap() == [float(n == 7) for n in range(20)]


async def test_no_requests_no_rewards(source: RewardSource) -> None:
    assert await source.score([]) == []


async def test_a_reward_that_is_not_finite_is_an_error(nan_source: RewardSource) -> None:
    with pytest.raises(RewardError, match="nan"):
        await nan_source.score([ask("7")])
