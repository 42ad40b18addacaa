"""Aborted requests go on where they were, and are returned whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine
from rollgrad.testing.rollout_engine import FakeRolloutEngine

REQUEST = GenerationRequest(
    prompt_token_ids=(65, 66, 67), params=SamplingParams(max_new_tokens=60, seed=3, top_logprobs=3)
)


@pytest.fixture(params=["fake", "embedded"])
def inner(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        return FakeRolloutEngine()
    path: Path = request.getfixturevalue("tiny_model_dir")
    model = load_causal_lm(
        str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--actor.model_name_or_path"
    )
    return EmbeddedEngine(model, eos_token_ids=(), decode=lambda ids: "".join(f"<{i}>" for i in ids))


async def swapped(engine: RolloutEngine, inner: Any, version: int) -> None:
    await engine.pause(PauseMode.ABORT)
    inner.set_version(version)
    await engine.resume()


async def test_a_reply_survives_any_number_of_aborts(inner: Any) -> None:
    whole = await inner.generate(REQUEST)
    engine = ContinuingEngine(inner)
    assert isinstance(engine, RolloutEngine)
    heard: list[int] = []
    task = asyncio.create_task(engine.generate(REQUEST, on_token=heard.append))
    for version in (1, 2, 3):
        while len(heard) < 10 * version:
            await asyncio.sleep(0)
        await swapped(engine, inner, version)
    reply = await task
    assert reply.stop_reason is StopReason.LENGTH
    assert list(reply.token_ids) == list(whole.token_ids) == heard
    assert list(reply.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)
    assert sorted(reply.versions) == list(reply.versions)
    assert set(reply.versions) == {0, 1, 2, 3}
    for mine, theirs in zip(reply.top_logprobs, whole.top_logprobs, strict=True):
        assert [logprob for _, logprob in mine] == pytest.approx([logprob for _, logprob in theirs], abs=1e-4)


async def test_a_request_that_was_aborted_before_its_first_token_is_asked_again(inner: Any) -> None:
    engine = ContinuingEngine(inner)
    await engine.pause(PauseMode.KEEP)
    task = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.sleep(0)
    await swapped(engine, inner, 1)
    assert set((await task).versions) == {1}


async def test_what_is_left_counts_what_was_sampled() -> None:
    inner = FakeRolloutEngine()
    engine = ContinuingEngine(inner)
    params = evolve(REQUEST.params, min_new_tokens=30)
    heard: list[int] = []
    task = asyncio.create_task(engine.generate(evolve(REQUEST, params=params), on_token=heard.append))
    while len(heard) < 20:
        await asyncio.sleep(0)
    await swapped(engine, inner, 1)
    await task
    count = inner.requests[1].begun
    assert 20 <= count < 30
    assert inner.requests[1].prompt_token_ids == (65, 66, 67, *heard[:count])
    rest = inner.requests[1].params
    assert (rest.max_new_tokens, rest.min_new_tokens, rest.seed) == (60 - count, 30 - count, 3)


async def test_a_stop_string_may_begin_before_the_abort(tiny_model_dir: Path) -> None:
    flag = "--actor.model_name_or_path"
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=flag)
    engine = EmbeddedEngine(model, eos_token_ids=(), decode=lambda ids: "".join(f"<{i}>" for i in ids))

    whole = (await engine.generate(REQUEST)).token_ids
    stop = f"<{whole[9]}><{whole[10]}>"
    params = evolve(REQUEST.params, max_new_tokens=50, stop_strings=(stop,))
    rest = await engine.generate(GenerationRequest(prompt_token_ids=(65, 66, 67, *whole[:10]), params=params, begun=10))
    assert (list(rest.token_ids), rest.stop_reason) == ([whole[10]], StopReason.STOP)
