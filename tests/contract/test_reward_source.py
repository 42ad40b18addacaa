"""What every reward source promises."""

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollgrad.adapters.http.reward import HttpReward
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.application.choices import Verifier
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.prompts import Prompt
from rollgrad.domain.rewards import RewardInput, RewardRequest
from rollgrad.domain.sampling import StopReason
from tests.fakes.reward_server import RewardServer
from tests.fakes.reward_source import FakeRewardSource


def ask(response: str, label: Any = "7") -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text=f"What makes {label}? ", label=label)
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


def plain(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    return [float(q.removeprefix(p) == y) for q, p, y in zip(queries, prompts, labels, strict=True)]


def judge(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
    """A reward model, which knows no label."""
    words = [re.findall("[0-9]+", reply.text) for reply in replies]
    return [(float(asked == answer), False) for asked, answer in words]


async def asynchronous(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"rewards": plain(queries, prompts, labels)}


@pytest.fixture(params=["fake", "function", "async_function", "exact_match", "last_number", "http", "model"])
def source(request: pytest.FixtureRequest) -> Iterator[RewardSource]:
    if request.param == "http":
        server = RewardServer(lambda body: (200, {"rewards": plain(body["query"], body["prompts"], body["labels"])}))
        yield HttpReward([server.url], timeout=120.0)
        server.close()
    elif request.param == "fake":
        yield FakeRewardSource()
    elif request.param == "model":
        yield ModelReward([judge, judge], timeout=120.0)
    elif request.param in ("function", "async_function"):
        yield FunctionReward(plain if request.param == "function" else asynchronous, timeout=120.0)
    else:
        yield VerifierReward(Verifier(request.param), timeout=120.0)


@pytest.fixture(params=["fake", "function", "model"])
def nan_source(request: pytest.FixtureRequest) -> RewardSource:
    return {
        "fake": FakeRewardSource(lambda request: math.nan),
        "function": FunctionReward(lambda q, p, y: [math.nan] * len(q), timeout=120.0),
        "model": ModelReward([lambda texts: [(math.nan, False) for _ in texts]], timeout=120.0),
    }[request.param]


def test_one_reward_a_request_in_order(source: RewardSource) -> None:
    assert isinstance(source, RewardSource)
    rewards = asyncio.run(source.score([ask("7"), ask("8"), ask("9", label="9")]))
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0]


def test_scoring_twice_gives_the_same(source: RewardSource) -> None:
    requests = [ask("7"), ask("1")]
    assert asyncio.run(source.score(requests)) == asyncio.run(source.score(requests))


def test_calls_may_overlap(source: RewardSource) -> None:
    async def overlap() -> list[float]:
        answers = await asyncio.gather(*(source.score([ask(str(n))]) for n in range(20)))
        return [answer[0].value for answer in answers]

    assert asyncio.run(overlap()) == [float(n == 7) for n in range(20)]


def test_no_requests_no_rewards(source: RewardSource) -> None:
    assert asyncio.run(source.score([])) == []


def test_a_reward_that_is_not_finite_is_an_error(nan_source: RewardSource) -> None:
    with pytest.raises(RewardError, match="nan"):
        asyncio.run(nan_source.score([ask("7")]))
