"""Places of episodes, and engines whose answers change how many there are."""

import asyncio

import pytest
from attrs import evolve

from rollgrad.application.engines.observed import ObservedEngine
from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.rollouts.slots import EpisodeSlots
from rollgrad.domain.control.admission import LEAST, START, Admission
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.testing.rollout_engine import FakeRolloutEngine


class KeepingEngine(FakeRolloutEngine):
    """Says that it has kept so many tokens."""

    tokens: int | None = 0

    async def generate(self, request: GenerationRequest, *, on_token: object = None) -> Generation:
        return evolve(await super().generate(request), kept=self.tokens)


async def test_places_are_given_in_the_order_of_arrival_and_cancelled_ones_are_passed_on() -> None:
    admission = Admission(2)
    slots, entered, leave = EpisodeSlots(admission), list[int](), asyncio.Event()

    async def episode(number: int) -> None:
        async with slots:
            entered.append(number)
            await leave.wait()

    tasks = [asyncio.create_task(episode(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert entered == [0, 1]
    assert admission.running == 2
    tasks[2].cancel()  # it waits
    tasks[0].cancel()  # it has a place
    await asyncio.sleep(0)
    tasks[3].cancel()  # it has just been given the place
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == [0, 1, 4]
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [0, 1, 4, 5]
    assert admission.running == 0


async def test_a_limit_that_has_fallen_lets_fewer_in_and_one_that_has_risen_more() -> None:
    admission = Admission(10**6, adapts=True)
    slots = EpisodeSlots(admission)
    assert admission.limit == START
    peak = 0

    async def episode() -> None:
        nonlocal peak
        async with slots:
            peak = max(peak, admission.running)
            await asyncio.sleep(0)

    for lost, expected in ((True, LEAST), (False, 100)):
        for _ in range(100):
            peak = 0
            await asyncio.gather(*(episode() for _ in range(admission.limit + 1)))
            assert peak == admission.limit
            admission.running = admission.limit
            admission.waited()
            for _ in range(admission.limit):
                admission.answered(1000, 300 if lost else 1000)
            admission.running = 0
            if admission.limit <= LEAST or admission.limit >= 100:
                break
        assert admission.limit == LEAST if lost else admission.limit >= expected


@pytest.mark.parametrize(
    ("continues", "version", "kept", "counts"),
    [(500, 0, 100, True), (0, None, 100, False), (500, 1, 0, False), (500, 0, None, False)],
    ids=["a later turn", "a first turn", "other weights", "it does not say"],
)
async def test_answers_to_later_turns_under_the_same_weights_count(
    continues: int, version: int | None, kept: int | None, counts: bool
) -> None:
    admission, inner = Admission(9), KeepingEngine()
    inner.tokens = kept
    engine = ObservedEngine(ContinuingEngine(inner), admission)
    request = GenerationRequest(
        prompt_token_ids=(1,) * 600,
        params=SamplingParams(max_new_tokens=2),
        continues=continues,
        continues_version=version,
    )
    assert (await engine.generate(request)).kept == kept
    assert bool(admission.metrics()) is counts
