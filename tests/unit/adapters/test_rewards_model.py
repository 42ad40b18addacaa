import asyncio
import math
import threading
from collections.abc import Sequence

import pytest

from rollgrad.adapters.rewards.model import BATCH_REPLIES, Judge, ModelReward
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardInput, RewardRequest
from rollgrad.domain.errors import RewardError, WorkerError

PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


def ask(response: object) -> RewardRequest:
    return RewardRequest(prompt=Prompt(token_ids=(1,), text="n="), response=str(response), stop_reason=StopReason.STOP)


def number(text: str) -> float:
    return float(text.removeprefix("n="))


class Copy:
    """A copy of a model that scores a text by its number, and counts what it was given."""

    def __init__(self, together: threading.Barrier | None = None) -> None:
        self.together = together
        self.batches: list[int] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        texts = [reply.text for reply in replies]
        self.batches.append(len(texts))
        self.threads.append(threading.current_thread())
        if self.together is not None:
            self.together.wait(PATIENCE)
        return [(number(text), number(text) < 0) for text in texts]


async def score(source: ModelReward, *responses: object) -> list[float]:
    rewards = await source.score([ask(response) for response in responses])
    return [reward.value for reward in rewards]


async def one_by_one(source: ModelReward, count: int) -> list[float]:
    answers = await asyncio.gather(*(source.score([ask(n)]) for n in range(count)))
    return [reward.value for (reward,) in answers]


async def test_what_arrives_together_is_scored_together() -> None:
    copy = Copy()
    values = await one_by_one(ModelReward([copy], timeout=PATIENCE), 100)
    assert values == [float(n) for n in range(100)]
    assert copy.batches == [BATCH_REPLIES, 100 - BATCH_REPLIES]
    assert threading.main_thread() not in copy.threads


async def test_copies_share_what_waits() -> None:
    together = threading.Barrier(3)  # none answers before all have something to score
    copies = [Copy(together) for _ in range(3)]
    values = await one_by_one(ModelReward(copies, timeout=PATIENCE), 30)
    assert values == [float(n) for n in range(30)]
    assert [copy.batches for copy in copies] == [[10]] * 3


async def test_what_arrives_while_all_copies_are_busy_is_scored_next() -> None:
    started, go_on = threading.Event(), threading.Event()
    batches: list[list[str]] = []

    def slow(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        texts = [reply.text for reply in replies]
        batches.append(texts)
        started.set()
        assert go_on.wait(PATIENCE)
        return [(number(text), False) for text in texts]

    source = ModelReward([slow], timeout=PATIENCE)
    first = asyncio.create_task(source.score([ask(1)]))
    while not started.is_set():  # the event loop goes on meanwhile
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(source.score([ask(n)])) for n in (2, 3)]
    cancelled = asyncio.create_task(source.score([ask(4)]))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    go_on.set()
    rewards: list[list[Reward]] = await asyncio.gather(first, *others)
    assert ([reward.value for (reward,) in rewards]) == [1.0, 2.0, 3.0]
    assert batches == [["n=1"], ["n=2", "n=3"]]


async def test_a_text_that_is_too_long_is_counted() -> None:
    rewards = await ModelReward([Copy()], timeout=PATIENCE).score([ask(-1), ask(2)])
    assert [reward.metrics for reward in rewards] == [{"query_truncated": 1.0}, {"query_truncated": 0.0}]


async def test_a_score_that_is_no_number_costs_its_own_reply() -> None:
    async def scenario() -> list[list[Reward] | BaseException]:
        source = ModelReward([Copy()], timeout=PATIENCE)
        return await asyncio.gather(*(source.score([ask(n)]) for n in (1, math.nan, 3)), return_exceptions=True)

    first, failed, last = await scenario()
    assert [first, last] == [[Reward(value=n, score=n, metrics={"query_truncated": 0.0})] for n in (1.0, 3.0)]
    assert isinstance(failed, RewardError)
    assert "nan" in str(failed)


def lost(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
    raise WorkerError("Of the 2 training processes of reward, rank 1 died.")


def confused(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
    raise ValueError("no tokens")


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lost, "Of the 2 training processes of reward, rank 1 died."),
        (confused, "The reward model raised ValueError: no tokens"),
    ],
)
async def test_what_the_model_raises_is_a_reward_error(judge: Judge, message: str) -> None:
    source = ModelReward([judge], timeout=PATIENCE)
    for _ in range(2):  # the source goes on
        with pytest.raises(RewardError) as error:
            await score(source, 1)
        assert str(error.value) == message


async def test_a_deadline_is_told_and_the_copy_is_used_again() -> None:
    go_on = threading.Event()

    def slow(replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        assert go_on.wait(PATIENCE)
        return [(number(reply.text), False) for reply in replies]

    source = ModelReward([slow], timeout=0.05)
    for _ in range(2):  # the second finds the copy still busy
        with pytest.raises(RewardError, match=r"did not score 1 reply within 0\.05 s: raise --reward\.timeout"):
            await source.score([ask(1)])
    go_on.set()
    source.timeout = PATIENCE
    ((reward,),) = [await source.score([ask(2)])]
    assert reward.value == 2.0
