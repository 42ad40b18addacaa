"""Tests of what is killed where the process of an actor stands still, and of calls to an actor that are given up."""

import asyncio
import subprocess
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from rollgrad.adapters.engines.ray_vllm import RayVLLMEngine, _Actor
from rollgrad.adapters.ray import processes
from tests.fakes import cluster


@pytest.mark.parametrize(("title", "ends"), [("ray::EngineHost.call", True), ("another", False)])
def test_an_actor_s_process_ends_with_all_that_it_has_started_and_no_other_process(title: str, ends: bool) -> None:
    """The id of one that has ended may be another process's by now. None of those that end acts on SIGTERM."""
    command = [title, "-c", "sleep 600 & wait"]
    with subprocess.Popen(command, executable="/bin/bash") as started:
        process = psutil.Process(started.pid)
        cluster.wait_for(lambda: cluster.title_of(process).startswith(title) and process.children(), "its child", 60)
        family = [*process.children(), process]
        try:
            for each in family:
                each.suspend()
            processes._kill(started.pid)
            if ends:
                cluster.wait_for(lambda: not any(map(cluster.lives, family)), "the end of all", 60)
            assert [cluster.lives(each) for each in family] == [not ends] * 2
        finally:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    processes._kill(started.pid)  # it has ended


class Reference:
    """A reference to the result of a call, which ends some time after it is cancelled."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def __await__(self) -> Generator[Any, None, None]:
        return self._result().__await__()

    async def _result(self) -> None:
        from ray.exceptions import TaskCancelledError

        await self.ended.wait()
        raise TaskCancelledError


async def test_a_generation_that_is_given_up_has_ended_in_its_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    cancelled: list[object] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    engine, reference = object.__new__(RayVLLMEngine), Reference()
    engine._actor = _Actor(None, "engine", 0)
    asked = asyncio.create_task(engine._generated(reference))
    await asyncio.sleep(0)
    asked.cancel()
    for _ in range(9):
        await asyncio.sleep(0)
    assert (cancelled, asked.done()) == ([reference], False)
    reference.ended.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
