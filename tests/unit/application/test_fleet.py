"""A fleet of fake engines that die: every request is answered once, by an engine with the current weights."""

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import MemberCalls, Taker
from rollgrad.domain.control.engine_health import NEAR_REQUESTS, Death, EngineState, FleetBounds
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing import rollout_engine
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.fakes.fleet_member import FakeFleetMember

pytestmark = pytest.mark.timeout(60)
"""After which a test has hung."""

PING = 0.005


def ask(seed: int = 0, prompt: tuple[int, ...] = (65, 66), **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, params=SamplingParams(**{"max_new_tokens": 8, "seed": seed, **params})
    )


def make(size: int = 2, max_restarts: int = 3, **settings: Any) -> tuple[EngineFleet, list[FakeFleetMember]]:
    """A fleet that takes no silence of a busy machine for death, unless asked to."""
    bounds = FleetBounds(
        suspect_after=settings.pop("suspect_after", 1000.0),
        dead_after=settings.pop("dead_after", 1000.0),
        max_restarts=max_restarts,
    )
    members = [FakeFleetMember() for _ in range(size)]
    return EngineFleet(members, bounds=bounds, ping_seconds=PING, **settings), members


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)  # every turn: in 5 ms of a fast machine a whole reply may have ended


async def alone(request: GenerationRequest) -> list[int]:
    return list((await FakeRolloutEngine().generate(request)).token_ids)


async def test_requests_go_to_the_engine_with_the_fewest() -> None:
    fleet, members = make(3)
    await asyncio.gather(*(fleet.generate(ask(seed, prompt=(seed,))) for seed in range(30)))
    assert [len(member.served) for member in members] == [10, 10, 10]
    await fleet.aclose()
    assert all(member.closed for member in members)


async def test_an_engine_that_did_not_start_is_replaced_while_others_play() -> None:
    members = [FakeFleetMember() for _ in range(3)]
    members[0].kill()
    members[0].fail_starts = 1
    with structlog.testing.capture_logs() as said:
        fleet = EngineFleet(members, not_started={0: "no room"}, ping_seconds=PING)
    assert [(line["event"], line["engine"], line["reason"]) for line in said] == [
        ("fleet.engine_died", 0, "engine 0 did not start: no room")
    ]
    assert fleet.health.serving == [1, 2]
    assert list((await fleet.generate(ask(3))).token_ids) == await alone(ask(3))
    await until(lambda: fleet.health.serving == [0, 1, 2])
    assert (members[0].restarts, fleet.health.deaths[Death.START]) == (2, 2)
    await fleet.aclose()


async def test_among_equals_the_engine_that_saw_the_prompt_is_preferred() -> None:
    fleet, members = make(3)
    for prompt in [(1,), (2,), (3,)]:
        await fleet.generate(ask(prompt=prompt))
    first = {request.prompt_token_ids: i for i, m in enumerate(members) for request, _ in m.served}
    begun = GenerationRequest(prompt_token_ids=(2, 9, 9), params=SamplingParams(max_new_tokens=2), begun=2)
    await asyncio.gather(fleet.generate(begun), fleet.generate(ask(prompt=(77,))))
    assert members[first[(2,)]].served[-1][0] is begun
    await fleet.aclose()


async def test_turns_of_an_episode_go_to_the_engine_that_has_the_earlier_ones() -> None:
    """Though others have fewer requests, as long as these are not many fewer."""
    fleet, members = make(3)
    answers = [await fleet.generate(evolve(ask(seed, prompt=(seed,)), keep=True)) for seed in range(3)]
    (home,) = (number for number, member in enumerate(members) if member.served[0][0].prompt_token_ids == (1,))
    history = (1, *answers[1].token_ids)
    turn = evolve(ask(prompt=(*history, 7, 7)), continues=len(history))
    for member in members:
        member.engine.latency = lambda request: 10**9
    waiting = [asyncio.create_task(fleet.generate(evolve(turn, keep=False))) for _ in range(NEAR_REQUESTS + 1)]
    await until(lambda: len(members[home].served) == 1 + NEAR_REQUESTS + 1)
    waiting.append(asyncio.create_task(fleet.generate(turn)))
    await until(lambda: sum(len(member.served) for member in members) == 3 + NEAR_REQUESTS + 2)
    assert len(members[home].served) == 1 + NEAR_REQUESTS + 1, "another reads the history again"
    members[home].kill()
    await until(lambda: sum(len(member.served) for member in members) == 3 + 2 * NEAR_REQUESTS + 3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await fleet.aclose()


@pytest.mark.parametrize("end", [FakeFleetMember.kill, FakeFleetMember.freeze], ids=["killed", "silent"])
async def test_what_a_dead_engine_was_playing_is_played_again(end: Callable[[FakeFleetMember], None]) -> None:
    silence: dict[str, Any] = {"dead_after": 1.0} if end is FakeFleetMember.freeze else {}
    fleet, members = make(2, **silence)
    for member in members:
        member.engine.latency = lambda request: 3
    requests = [ask(seed, max_new_tokens=40) for seed in range(20)]
    heard: list[list[int]] = [[] for _ in requests]
    tasks = [
        asyncio.create_task(fleet.generate(request, on_token=tokens.append))
        for request, tokens in zip(requests, heard, strict=True)
    ]
    await until(lambda: min(map(len, heard)) > 2)
    end(members[0])
    answers = await asyncio.gather(*tasks)
    for request, answer, tokens in zip(requests, answers, heard, strict=True):
        assert list(answer.token_ids) == await alone(request)
        assert tokens == list(answer.token_ids), "each position was told once"
    assert fleet.replayed == 10
    await until(lambda: fleet.health.serving == [0, 1])
    assert members[0].restarts == 1
    assert fleet.health.deaths.total() == 1
    await fleet.aclose()


async def test_a_request_that_a_well_engine_refuses_is_an_error_and_no_death() -> None:
    fleet, members = make(1)
    members[0].engine.fail_with = "it makes no sense"
    with pytest.raises(EngineError, match="it makes no sense"):
        await fleet.generate(ask())
    assert not fleet.health.deaths
    assert len((await fleet.generate(ask())).token_ids) == 8
    await fleet.aclose()


async def test_without_a_serving_engine_the_wait_ends() -> None:
    fleet, _ = make(2, wait_seconds=0.05)
    fleet.new_weights(1)
    with pytest.raises(EngineError, match=r"Waited 0\.05 s for an engine that serves; the fleet is: 2 stale"):
        await fleet.generate(ask())
    fleet.took(await fleet.takers(), 1)
    assert len((await fleet.generate(ask())).token_ids) == 8
    await fleet.aclose()


async def test_when_the_restarts_are_used_up_all_who_wait_hear_why() -> None:
    fleet, members = make(2, max_restarts=1)
    for member in members:
        member.engine.latency = lambda request: 10**9
        member.fail_starts = 1
    tasks = [asyncio.create_task(fleet.generate(ask(seed))) for seed in range(8)]
    await until(lambda: all(member.served for member in members))
    for member in members:
        member.kill()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "All 2 engines are dead" in str(result)
        assert "no room" in str(result)
    with pytest.raises(EngineError, match="All 2 engines are dead"):
        await fleet.takers()
    for work in (fleet.pause(PauseMode.ABORT), fleet.resume(), fleet.sleep(), fleet.wake(), fleet.aclose()):
        await work


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_engine_that_dies_in_a_pause_is_replaced_and_its_requests_go_on_after_it(mode: PauseMode) -> None:
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 3
    tasks = [asyncio.create_task(fleet.generate(ask(seed, max_new_tokens=60))) for seed in range(10)]
    await until(lambda: all(member.served for member in members))
    if mode is PauseMode.WAIT:
        pausing = asyncio.create_task(fleet.pause(mode))
        await asyncio.sleep(0)
        members[0].kill()
        await pausing
    else:
        members[0].kill()
        await fleet.pause(mode)
    assert not fleet.health.serves(0) or members[0].restarts
    late = asyncio.create_task(fleet.generate(ask(99)))
    await until(lambda: fleet.health.serving == [0, 1])
    assert not late.done()
    await fleet.resume()
    for seed, answer in enumerate(await asyncio.gather(*tasks)):
        full = await alone(ask(seed, max_new_tokens=60))
        if mode is PauseMode.ABORT:
            assert answer.stop_reason is StopReason.ABORTED
            assert list(answer.token_ids) == full[: len(answer.token_ids)]
        else:
            assert list(answer.token_ids) == full
    assert len((await late).token_ids) == 8
    await fleet.aclose()


async def test_a_streamed_reply_whose_engine_dies_in_a_pause_is_played_again_before_the_weights_change() -> None:
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 3
    heard: list[list[int]] = [[] for _ in range(10)]
    tasks = [
        asyncio.create_task(fleet.generate(ask(seed, max_new_tokens=60), on_token=tokens.append))
        for seed, tokens in enumerate(heard)
    ]
    await until(lambda: min(map(len, heard)) > 2)
    pausing = asyncio.create_task(fleet.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    members[0].kill()
    late = asyncio.create_task(fleet.generate(ask(99)))
    await pausing
    assert fleet.replayed == 5
    for seed, (task, tokens) in enumerate(zip(tasks, heard, strict=True)):
        assert task.done()
        assert list(task.result().token_ids) == tokens == await alone(ask(seed, max_new_tokens=60))
    assert not late.done()
    await fleet.resume()
    assert len((await late).token_ids) == 8
    await fleet.aclose()


async def test_a_pause_does_not_wait_for_an_engine() -> None:
    """Not even for the sake of a streamed reply, since the weights that its engine needs may come with the pause."""

    fleet, members = make(1, max_restarts=10**6)
    members[0].engine.latency = lambda request: 3
    members[0].fail_starts = 10**6
    heard: list[int] = []
    task = asyncio.create_task(fleet.generate(ask(max_new_tokens=60), on_token=heard.append))
    await until(lambda: len(heard) > 5)
    members[0].kill()
    await fleet.pause(PauseMode.WAIT)
    assert not task.done()
    members[0].fail_starts = 0
    await fleet.resume()
    assert list((await task).token_ids) == heard == await alone(ask(max_new_tokens=60))
    await fleet.aclose()


@pytest.mark.parametrize("more", [{}, {"stop_strings": ("never",)}, {"top_logprobs": 1}], ids=str)
async def test_a_streamed_reply_goes_on_after_what_was_told(more: dict[str, Any]) -> None:
    """On an engine that would have sampled other tokens. Where it cannot, it fails, and tells nothing of them."""

    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 3
    heard: list[int] = []
    request = ask(max_new_tokens=60, **more)
    task = asyncio.create_task(fleet.generate(request, on_token=heard.append))
    await until(lambda: len(heard) > 5)
    (first,) = (member for member in members if member.served)
    (second,) = (member for member in members if not member.served)
    another = second.engine.generate

    def differently(asked: GenerationRequest, **how: Any) -> Awaitable[Generation]:
        return another(evolve(asked, params=evolve(asked.params, seed=7)), **how)

    second.engine.generate = differently  # type: ignore[method-assign]
    second.engine.set_version(1)
    told = list(heard)
    first.kill()
    if more:
        with pytest.raises(EngineError, match="another sampled other tokens: ask again"):
            await task
        assert heard == told
        return
    answer = await task
    ((rest, _),) = second.served
    assert rest.prompt_token_ids == (*request.prompt_token_ids, *told)
    assert (rest.begun, rest.params.max_new_tokens) == (len(told), 60 - len(told))
    assert heard == list(answer.token_ids)
    assert heard[: len(told)] == told
    assert len(answer.token_ids) == len(answer.logprobs) == 60
    assert list(answer.versions) == [0] * len(told) + [1] * (60 - len(told))
    assert answer.token_ids[len(told) :] != (await alone(request))[len(told) :]
    await fleet.aclose()


async def test_a_reply_that_was_told_whole_is_played_again() -> None:
    """Nothing follows it, so nothing can be asked to."""
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 3
    heard: list[int] = []
    request = ask(max_new_tokens=20)
    (stop,) = (await alone(request))[9:10]
    request = ask(max_new_tokens=20, stop_token_ids=(stop,))

    def hear(token: int) -> None:
        heard.append(token)
        if token == stop and len([member for member in members if member.served]) == 1:
            next(member for member in members if member.served).kill()

    answer = await fleet.generate(request, on_token=hear)
    assert heard == list(answer.token_ids)
    assert heard[-1] == stop
    assert answer.stop_reason is StopReason.STOP
    await fleet.aclose()


async def test_a_streamed_reply_that_would_go_on_otherwise_fails_where_engines_tell_tokens_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with other weights is as one that answers another request."""

    monkeypatch.setattr(rollout_engine, "tell", lambda on_token, token, *_, **__: on_token(token))
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 3
    heard: list[int] = []
    task = asyncio.create_task(fleet.generate(ask(max_new_tokens=60), on_token=heard.append))
    await until(lambda: len(heard) > 5)
    (first,) = (member for member in members if member.served)
    (second,) = (member for member in members if not member.served)
    another = second.engine.generate
    second.engine.generate = lambda request, **how: another(ask(7, max_new_tokens=60), **how)  # type: ignore[method-assign]
    told = list(heard)
    first.kill()
    with pytest.raises(EngineError, match="another sampled other tokens: ask again"):
        await task
    assert heard == told, "nothing of the other reply was told"
    await fleet.aclose()


async def test_an_abort_does_not_make_a_replay_tell_its_tokens_twice() -> None:
    fleet, members = make(1)
    members[0].engine.latency = lambda request: 3
    heard: list[int] = []
    task = asyncio.create_task(fleet.generate(ask(max_new_tokens=60), on_token=heard.append))
    await until(lambda: len(heard) > 5)
    members[0].kill()
    await fleet.pause(PauseMode.ABORT)
    await fleet.resume()
    assert list((await task).token_ids) == heard == await alone(ask(max_new_tokens=60))
    await fleet.aclose()


async def test_what_a_pause_waits_for_is_frozen_by_a_later_pause() -> None:
    fleet, members = make(1)
    members[0].engine.latency = lambda request: 3
    task = asyncio.create_task(fleet.generate(ask(max_new_tokens=60)))
    await until(lambda: bool(members[0].served))
    waiting = asyncio.create_task(fleet.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await fleet.pause(PauseMode.KEEP)
    await waiting
    assert members[0].engine._flow.paused
    assert members[0].engine._flow.in_flight
    await fleet.resume()
    assert list((await task).token_ids) == await alone(ask(max_new_tokens=60))
    await fleet.aclose()


async def test_a_pause_that_waits_ends_with_a_resume_whose_answer_is_on_its_way() -> None:
    fleet, members = make(1)
    member = members[0]
    task = asyncio.create_task(fleet.generate(ask(max_new_tokens=60)))
    resume = member.resume

    async def slowly() -> None:
        await resume()
        await task

    member.resume = slowly  # type: ignore[method-assign]
    await until(lambda: bool(member.served))
    waiting = asyncio.create_task(fleet.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await fleet.resume()
    await waiting
    assert len((await fleet.generate(ask(1))).token_ids) == 8
    await fleet.aclose()


async def test_an_abort_ends_a_request_that_waits() -> None:
    fleet, _ = make(1)
    await fleet.pause(PauseMode.WAIT)
    task = asyncio.create_task(fleet.generate(ask()))
    await asyncio.sleep(0)
    await fleet.pause(PauseMode.ABORT)
    answer = await task
    assert (list(answer.token_ids), answer.stop_reason) == ([], StopReason.ABORTED)
    await fleet.aclose()


async def test_a_member_that_fails_to_sleep_is_replaced_though_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, members = make(2)

    async def fail() -> None:
        raise EngineError("vLLM failed: no memory to pin")

    monkeypatch.setattr(members[0].engine, "sleep", fail)
    await fleet.sleep()
    assert fleet.health.living == [1]
    assert [member.closed for member in members] == [True, False]
    await fleet.wake()
    await until(lambda: fleet.health.serving == [0, 1])
    assert members[0].restarts == 1
    await fleet.aclose()


async def test_a_member_that_cannot_pause_or_sleep_is_dead_and_not_the_run() -> None:
    fleet, members = make(3, call_seconds=2.0)
    members[0].kill()
    await fleet.pause(PauseMode.KEEP)
    members[1].freeze()
    await fleet.sleep()
    assert fleet.health.living == ([0, 2] if members[0].restarts else [2])
    assert fleet.health.deaths == {Death.FAILED: 1, Death.SILENT: 1}
    assert members[1].closed, "it would keep the memory that models train in"
    await asyncio.sleep(4 * PING)
    assert [member.restarts for member in members] in ([0, 0, 0], [1, 0, 0]), "who starts would be awake"
    await fleet.wake()
    await fleet.resume()
    await until(lambda: fleet.health.serving == [0, 1, 2])
    await fleet.aclose()


async def test_time_in_which_the_process_stood_still_is_no_silence() -> None:
    fleet, members = make(2, suspect_after=0.3, dead_after=0.5)
    await fleet.generate(ask())
    for _ in range(3):
        time.sleep(0.6)  # as a training step does that holds the event loop
        await until(lambda: True)
        before = members[0].pings
        await until(lambda: members[0].pings > before)  # noqa: B023
    assert not fleet.health.deaths
    assert fleet.health.serving == [0, 1]
    await fleet.aclose()


async def test_engines_that_answer_requests_are_not_asked_how_they_are() -> None:
    fleet, members = make(1)
    fleet._watched._ping_seconds = 1000.0
    await asyncio.gather(*(fleet.generate(ask(seed)) for seed in range(100)))
    assert members[0].pings == 0
    await fleet.aclose()


async def test_requests_in_flight_when_the_fleet_closes_get_an_error() -> None:
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 10**9
    tasks = [asyncio.create_task(fleet.generate(ask(seed))) for seed in range(4)]
    await until(lambda: all(member.served for member in members))
    await fleet.aclose()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
    with pytest.raises(EngineError, match="closed"):
        await fleet.generate(ask())


@pytest.mark.filterwarnings("error:coroutine:RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_work_that_has_not_begun_when_the_fleet_closes_is_not_forgotten() -> None:
    """A coroutine that nobody awaits is a warning of Python's, here an error."""

    fleet, members = make(2, max_restarts=0)
    await fleet.generate(ask())
    fleet._watched.mark_dead(0, Death.FAILED, "the test says so")  # its end is a task, which begins in the next turn
    await fleet.aclose()
    assert all(member.closed for member in members)


async def test_a_cancelled_request_leaves_no_trace() -> None:
    fleet, members = make(2)
    for member in members:
        member.engine.latency = lambda request: 10**9
    tasks = [asyncio.create_task(fleet.generate(ask(seed))) for seed in range(4)]
    await until(lambda: all(member.served for member in members))
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(result, asyncio.CancelledError) for result in await asyncio.gather(*tasks, return_exceptions=True)
    )
    await fleet.sleep()
    with pytest.raises(EngineError, match="wake it first"):
        fleet.new_weights(1)
    await fleet.wake()
    fleet.new_weights(1)
    await fleet.aclose()


def refreshing(
    fleet: EngineFleet, current: Callable[[], int], chance: random.Random
) -> Callable[[Taker], Awaitable[None]]:
    """As a weight channel does it: takes a while, may fail, may be too late."""

    async def refresh(taker: Taker) -> None:
        member = taker.member
        assert isinstance(member, FakeFleetMember)
        engine, version = member.engine, current()
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            member.kill()
            fleet.lost(taker, "The engine died while it took weights.")
        elif version == current():
            engine.version = version
            fleet.took([taker], version)

    return refresh


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
async def test_under_random_deaths_pauses_and_pushes_every_request_is_answered_once_and_rightly(
    size: int, seed: int
) -> None:
    chance = random.Random(seed)
    fleet, members = make(size, max_restarts=10**6)
    fleet._watched._ping_seconds = 0.0005
    version = 0
    fleet.refresh = refreshing(fleet, lambda: version, chance)
    answers: dict[int, Generation] = {}
    begun: dict[int, int] = {}

    async def one(index: int) -> None:
        request = ask(index, prompt=(index % 7 + 1,), max_new_tokens=chance.randint(1, 12))
        heard: list[int] = []
        begun[index] = version
        answer = await fleet.generate(request, on_token=heard.append if index % 2 else None)
        assert index not in answers
        answers[index] = answer
        full = await alone(request)
        assert answer.stop_reason in (StopReason.LENGTH, StopReason.ABORTED)
        assert list(answer.token_ids) == full[: len(answer.token_ids)]
        assert answer.stop_reason is StopReason.ABORTED or len(answer.token_ids) == len(full)
        assert heard == (list(answer.token_ids) if index % 2 else [])
        assert list(answer.versions) == sorted(answer.versions)
        assert all(begun[index] <= v <= version for v in answer.versions)

    async def disturb() -> None:
        nonlocal version
        for _ in range(12):
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
            event = chance.choice(["kill", "kill", "push", "pause", "fail"])
            member = chance.choice(members)
            if event == "kill":
                member.kill()
            elif event == "fail":
                member.fail_starts = chance.randint(0, 2)
            else:
                await fleet.pause(chance.choice(list(PauseMode)))
                if event == "push":
                    version += 1
                    fleet.new_weights(version)
                    taking = await fleet.takers()
                    await asyncio.sleep(0)
                    for taker in taking:
                        assert isinstance(taker.member, FakeFleetMember)
                        if fleet._lives(taker):
                            taker.member.engine.version = version
                        if chance.random() < 0.2:
                            fleet.lost(taker, "it died while it took weights")
                    fleet.took(taking, version)
                await fleet.resume()

    count = 60
    tasks = [asyncio.create_task(one(index)) for index in range(count // 2)]
    disturbing = asyncio.create_task(disturb())
    for index in range(count // 2, count):
        tasks.append(asyncio.create_task(one(index)))
        await asyncio.sleep(0)
    await disturbing
    for member in members:
        member.fail_starts = 0
    await asyncio.gather(*tasks)
    assert sorted(answers) == list(range(count))
    assert not any(fleet._watched.loads._loads)
    assert not fleet._flow.in_flight
    await until(lambda: fleet.health.states[EngineState.HEALTHY] == size)
    await fleet.aclose()


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_cancelled_call_has_left_its_member_unless_that_is_given_up(given_up: bool) -> None:
    begun, cancelled, leaves, left = (asyncio.Event() for _ in range(4))

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await leaves.wait()
            left.set()

    traces: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: traces.append(context["message"]))
    calls = MemberCalls()
    asked = asyncio.create_task(calls.ask(work()))
    await begun.wait()
    asked.cancel()
    await cancelled.wait()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not asked.done()
    (calls.give_up if given_up else leaves.set)()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert left.is_set() is not given_up
    del asked
    await asyncio.sleep(0.01)
    gc.collect()
    assert not traces, "nobody asks for the error of a call that nobody waits for"
