"""Promises of every rollout engine."""

import asyncio
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded import decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.step_graphs import StepGraphs
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import Taker
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.caught_requests import begun, caught, paused
from tests.fakes.fleet_member import FakeFleetMember
from tests.fakes.step_graphs import Recorder
from tests.tiny_models import LONG

pytestmark = pytest.mark.asyncio(loop_scope="session")  # vLLM serves all tests
VLLM = [pytest.param("vllm", marks=pytest.mark.slow)] if importlib.util.find_spec("vllm") else []
"""vLLM takes half a minute to start, so one engine serves all its tests."""


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_causal_lm(
        str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--actor.model_name_or_path"
    )


class FakeFleet(EngineFleet):
    """Three fake engines behind one, which take weights at once."""

    def __init__(self) -> None:
        self.fakes = [FakeFleetMember() for _ in range(3)]
        super().__init__(self.fakes)

    def set_version(self, version: int) -> None:
        self.new_weights(version)
        for member in self.fakes:
            member.set_version(version)
        self.took([Taker(member, number, 0) for number, member in enumerate(self.fakes)], version)


@pytest.fixture(params=["fake", "fleet", "embedded", "captured", *VLLM])
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    if request.param == "fake":
        return FakeRolloutEngine
    if request.param == "fleet":
        return FakeFleet
    if request.param == "vllm":
        engine = request.getfixturevalue("vllm_engine")
        return lambda: engine
    model = request.getfixturevalue("model")
    if request.param == "captured":  # as on a GPU
        made = partial(StepGraphs, model, torch.device("cpu"), Recorder(model))
        request.getfixturevalue("monkeypatch").setattr(decoding, "step_graphs", lambda *_: made())
    return lambda: EmbeddedEngine(model, eos_token_ids=(), max_batch_size=8)


def ask(seed: int = 0, prompt: tuple[int, ...] = (65, 66, 67), **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, params=SamplingParams(**{"max_new_tokens": 8, "seed": seed, **params})
    )


def length_of(engine: RolloutEngine) -> int:
    """Tokens of a request that is still sampled when this process looks again; the embedded engine, whose steps this
    process asks for, has not gone on meanwhile."""
    return 40 if isinstance(engine, EmbeddedEngine) else LONG


async def started(engine: RolloutEngine, *requests: GenerationRequest) -> "list[asyncio.Task[Generation]]":
    """Requests that have drawn a token or more, and not all, as far as this process knows."""
    while True:
        tasks = await begun(engine, *requests)
        if not any(task.done() for task in tasks):
            return tasks
        await asyncio.gather(*tasks)  # this process, kept from working, heard of an engine's replies too late


async def test_each_token_has_logprob_and_version(make: Callable[[], Any]) -> None:
    engine = make()
    assert isinstance(engine, RolloutEngine)
    engine.set_version(3)
    generation = await engine.generate(ask())
    assert generation.stop_reason is StopReason.LENGTH
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.versions) == 8
    assert set(generation.versions) == {3}
    assert all(logprob <= 0 for logprob in generation.logprobs)


async def test_the_likeliest_tokens_are_those_of_the_distribution_that_is_sampled(make: Callable[[], Any]) -> None:
    """Also where a request beside it asks for none, and of replies that are heard as they come."""
    count = 19  # as many as a server of vLLM tells
    asked = ask(top_logprobs=count, temperature=0.7)
    engine = make()
    reply, none = await asyncio.gather(engine.generate(asked), engine.generate(ask(seed=1)))
    assert not none.top_logprobs
    assert len(reply.top_logprobs) == len(reply.token_ids)
    for token, logprob, told in zip(reply.token_ids, reply.logprobs, reply.top_logprobs, strict=True):
        ranked = [likely for _, likely in told]
        assert len({one for one, _ in told}) == count
        assert ranked == sorted(ranked, reverse=True)
        assert sum(map(math.exp, ranked)) <= 1 + 1e-5
        assert dict(told).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
        assert token in dict(told) or logprob <= ranked[-1] + 1e-4
    heard = await make().generate(asked, on_token=lambda token: None)
    for whole, parts in zip(reply.top_logprobs, heard.top_logprobs, strict=True):
        assert [likely for _, likely in parts] == pytest.approx([likely for _, likely in whole], abs=1e-4)


async def test_a_request_depends_on_itself_alone(make: Callable[[], Any]) -> None:
    requests = [ask(seed=s, prompt=(70 + s % 3,) * (1 + s % 4)) for s in range(20)]
    alone = [await make().generate(request) for request in requests]
    engine = make()
    together = await asyncio.gather(*(engine.generate(request) for request in reversed(requests)))
    assert [list(g.token_ids) for g in reversed(together)] == [list(g.token_ids) for g in alone]


async def test_other_seed_other_tokens(make: Callable[[], Any]) -> None:
    engine = make()
    first, second = await engine.generate(ask(seed=1)), await make().generate(ask(seed=2))
    assert list(first.token_ids) != list(second.token_ids)


async def test_a_stop_token_is_part_of_the_reply(make: Callable[[], Any]) -> None:
    full = await make().generate(ask())
    stop = full.token_ids[4]
    generation = await make().generate(ask(stop_token_ids=(stop,)))
    assert generation.stop_reason is StopReason.STOP
    assert list(generation.token_ids) == list(full.token_ids)[: list(full.token_ids).index(stop) + 1]


async def test_an_empty_prompt_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(EngineError):
        await make().generate(ask(prompt=()))


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_pause_and_resume_are_idempotent(make: Callable[[], Any], mode: PauseMode) -> None:
    engine = make()
    await engine.pause(mode)
    await engine.pause(mode)
    await engine.resume()
    await engine.resume()
    assert len((await engine.generate(ask())).token_ids) == 8


async def test_abort_returns_valid_tokens_at_once(make: Callable[[], Any]) -> None:
    engine = make()
    full = await make().generate(ask(max_new_tokens=length_of(engine)))
    (task,) = await paused(engine, PauseMode.ABORT, ask(max_new_tokens=length_of(engine)))
    assert task.done()
    generation = await task
    assert generation.stop_reason is StopReason.ABORTED
    count = len(generation.token_ids)
    assert 0 < count < length_of(engine)
    assert list(generation.token_ids) == list(full.token_ids)[:count]


async def test_wait_lets_requests_finish(make: Callable[[], Any]) -> None:
    engine = make()
    (task,) = await started(engine, ask(max_new_tokens=length_of(engine)))
    await engine.pause(PauseMode.WAIT)
    assert task.done()
    assert (await task).stop_reason is StopReason.LENGTH


async def test_keep_freezes_until_resume_under_new_weights(make: Callable[[], Any]) -> None:
    engine = make()
    full = await make().generate(ask(max_new_tokens=length_of(engine)))
    (task,) = await paused(engine, PauseMode.KEEP, ask(max_new_tokens=length_of(engine)))
    assert not task.done()
    engine.set_version(1)
    await engine.resume()
    generation = await task
    assert set(generation.versions) == {0, 1}
    assert list(generation.token_ids) == list(full.token_ids)


async def test_requests_made_while_paused_wait(make: Callable[[], Any]) -> None:
    engine = make()
    await engine.pause(PauseMode.WAIT)
    task = asyncio.create_task(engine.generate(ask()))
    await asyncio.sleep(0.02)
    assert not task.done()
    await engine.resume()
    assert len((await task).token_ids) == 8


async def test_requests_made_while_a_pause_waits_are_held(make: Callable[[], Any]) -> None:
    engine = make()
    (first,) = await started(engine, ask(max_new_tokens=length_of(engine)))
    pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    late = [asyncio.create_task(engine.generate(ask(seed=s))) for s in range(10)]
    await pausing
    assert first.done()
    assert not any(task.done() for task in late)
    engine.set_version(1)
    await engine.resume()
    assert {version for task in late for version in (await task).versions} == {1}


async def test_a_reply_goes_on_where_another_request_left_it(
    make: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    # vLLM cannot take up the random numbers of another request.
    temperature = 0.0 if request.node.callspec.params["make"] in ("vllm", "server") else 1.0

    whole = await make().generate(ask(max_new_tokens=20, temperature=temperature))
    begun = tuple(whole.token_ids[:12])
    rest_of_it = ask(prompt=(65, 66, 67, *begun), max_new_tokens=8, temperature=temperature)
    rest = await make().generate(evolve(rest_of_it, begun=12))
    assert list(rest.token_ids) == list(whole.token_ids)[12:]
    assert list(rest.logprobs) == pytest.approx(list(whole.logprobs)[12:], abs=1e-4)


async def test_sleep_refuses_in_flight_and_is_idempotent(make: Callable[[], Any]) -> None:
    engine = make()
    (task,) = await started(engine, ask(max_new_tokens=length_of(engine)))
    with pytest.raises(EngineError):
        await engine.sleep()
    await task
    for move in (engine.sleep, engine.sleep, engine.wake, engine.wake):
        await move()
    assert len((await engine.generate(ask())).token_ids) == 8


async def test_a_cancelled_call_frees_its_place(make: Callable[[], Any]) -> None:
    engine = make()
    tasks = await started(engine, *(ask(seed=s, max_new_tokens=length_of(engine)) for s in range(7)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.sleep()  # as a run does where it has given up what it no longer needs
    await engine.wake()
    assert len((await engine.generate(ask())).token_ids) == 8
    await engine.pause(PauseMode.WAIT)
    await engine.sleep()


async def test_new_weights_while_requests_run_are_refused(make: Callable[[], Any]) -> None:
    engine = make()
    (task,) = await started(engine, ask(max_new_tokens=length_of(engine)))
    with pytest.raises(EngineError, match="pause"):
        engine.set_version(1)
    await task


async def test_a_reply_may_be_as_long_as_it_says(make: Callable[[], Any]) -> None:
    engine = make()
    assert engine.max_tokens is None or engine.max_tokens > 8
    assert len((await engine.generate(ask())).token_ids) == 8


async def test_requests_made_while_it_sleeps_wait_until_it_wakes(make: Callable[[], Any]) -> None:
    engine = make()
    await engine.sleep()
    task = asyncio.create_task(engine.generate(ask()))
    await asyncio.sleep(0.02)
    assert not task.done()
    await engine.wake()
    assert len((await task).token_ids) == 8


async def test_an_abort_spares_requests_that_come_after_it(make: Callable[[], Any]) -> None:
    engine = make()
    late: asyncio.Task[Generation]

    async def abort() -> None:
        nonlocal late
        pausing = asyncio.create_task(engine.pause(PauseMode.ABORT))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(ask()))
        await pausing

    (early,) = await caught(
        lambda: begun(engine, ask(max_new_tokens=length_of(engine))), abort, lambda: engine.resume()
    )
    assert (await early).stop_reason is StopReason.ABORTED
    assert not late.done()
    await engine.resume()
    assert (await late).stop_reason is StopReason.LENGTH


class Ear:
    """Hears the tokens of a reply; `second` is set with its second."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.second = asyncio.Event()

    def hear(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) == 2:
            self.second.set()


async def test_tokens_are_heard_while_they_are_sampled(make: Callable[[], Any]) -> None:
    """An abort at the second token comes before the reply's end, unless tokens are told in one piece."""
    engine = make()
    for _ in range(5):  # this process may be kept from working
        ear = Ear()
        task = asyncio.create_task(engine.generate(ask(max_new_tokens=length_of(engine)), on_token=ear.hear))
        await ear.second.wait()
        await engine.pause(PauseMode.ABORT)
        generation = await task
        await engine.resume()
        assert ear.tokens == list(generation.token_ids)
        if len(ear.tokens) < length_of(engine):
            return
    raise AssertionError("each reply was whole when its second token was heard")


async def test_a_frozen_reply_repeats_no_token_when_it_goes_on(make: Callable[[], Any]) -> None:
    engine, ear = make(), Ear()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=length_of(engine)), on_token=ear.hear))
    await ear.second.wait()
    await engine.pause(PauseMode.KEEP)
    await engine.resume()
    generation = await task
    assert ear.tokens == list(generation.token_ids)
    assert len(generation.logprobs) == len(generation.versions) == len(ear.tokens) == length_of(engine)


async def test_replies_are_streamed_side_by_side_and_a_cancelled_one_frees_its_place(make: Callable[[], Any]) -> None:
    engine = make()
    ears = [Ear() for _ in range(8)]
    tasks = [
        asyncio.create_task(engine.generate(ask(seed, max_new_tokens=length_of(engine)), on_token=ear.hear))
        for seed, ear in enumerate(ears)
    ]
    for ear in ears:
        await ear.second.wait()
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks[::2], return_exceptions=True)
    told = [len(ear.tokens) for ear in ears]
    for task, ear, count in zip(tasks, ears, told, strict=True):
        if task.cancelled():
            assert len(ear.tokens) == count, "nothing is heard of what was given up"
        else:
            assert ear.tokens == list((await task).token_ids)
    await engine.pause(PauseMode.WAIT)
    await engine.sleep()
    await engine.wake()
    await engine.resume()
