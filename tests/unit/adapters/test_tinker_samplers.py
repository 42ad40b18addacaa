"""Samplers of the Tinker server: which are in memory, and when their engines sleep."""

import asyncio
from typing import Any

import pytest

from rollgrad.adapters.servers.tinker.samplers import IDLE, Sampler, Samplers, Weights
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import EngineError
from rollgrad.testing.rollout_engine import FakeRolloutEngine

PROMPT = (1, 2, 3)


class SleepyEngine(FakeRolloutEngine):
    """Remembers whether it sleeps."""

    asleep = False

    async def sleep(self) -> None:
        await super().sleep()
        self.asleep = True
        await asyncio.sleep(0)  # who comes meanwhile must wake it

    async def wake(self) -> None:
        await super().wake()
        self.asleep = False


@pytest.fixture
def made() -> list[SleepyEngine]:
    return []


@pytest.fixture
def samplers(made: list[SleepyEngine]) -> Samplers:
    async def load(weights: Weights) -> Sampler:
        made.append(SleepyEngine())
        unused: Any = None
        return Sampler(engine=made[-1], model=unused)

    return Samplers(load)


async def sample(samplers: Samplers, name: str, tokens: int = 3, count: int = 2) -> None:
    params = SamplingParams(max_new_tokens=tokens)
    replies, _ = await samplers.sample(name, PROMPT, params, count, scored=False)
    assert [len(reply.token_ids) for reply in replies] == [tokens] * count


async def test_an_engine_sleeps_while_nobody_uses_it(samplers: Samplers, made: list[SleepyEngine]) -> None:
    samplers.add("one", Weights())
    for _ in range(2):
        await sample(samplers, "one")
        (engine,) = made
        assert engine.asleep
    shorter = asyncio.create_task(sample(samplers, "one", tokens=1))
    await sample(samplers, "one", tokens=30)
    assert shorter.done()
    assert engine.asleep
    for length in range(8):  # some of them come while it falls asleep
        await asyncio.gather(sample(samplers, "one", tokens=1), sample(samplers, "one", tokens=1 + length))
        assert engine.asleep


async def test_an_engine_falls_asleep_after_a_failure_too(samplers: Samplers, made: list[SleepyEngine]) -> None:
    samplers.add("one", Weights())
    await sample(samplers, "one")
    (engine,) = made
    engine.fail_with = "out of memory"
    with pytest.raises(EngineError, match="out of memory"):
        await sample(samplers, "one", tokens=5, count=3)
    await sample(samplers, "one", tokens=20, count=1)
    assert engine.asleep


async def test_a_few_idle_samplers_stay_in_memory(samplers: Samplers, made: list[SleepyEngine]) -> None:
    names = [f"sampler {number}" for number in range(IDLE + 1)]
    for name in names:
        samplers.add(name, Weights())
        await sample(samplers, name)
    assert len(made) == IDLE + 1
    await sample(samplers, names[1])
    assert len(made) == IDLE + 1
    await sample(samplers, names[0])
    assert len(made) == IDLE + 2, "it was the longest unused"
