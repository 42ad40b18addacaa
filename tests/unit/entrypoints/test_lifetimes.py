"""Containers close all that they made: in its event loop or at the end, once, also when a run or a closing fails."""

import asyncio

import pytest
from dependency_injector import containers, providers

from rollgrad.adapters.models.torch import allocator
from rollgrad.domain.errors import EngineError
from rollgrad.entrypoints.composition.lifetimes import (
    LoopResource,
    closed_at_end,
    closing,
    given,
    gives_memory_back,
    shut_down,
)

CLOSED: list[str] = []


class AtEnd:
    def __init__(self, name: str, *needs: object, fails: bool = False) -> None:
        self._name, self._fails = name, fails

    def close(self) -> None:
        CLOSED.append(self._name)
        if self._fails:
            raise OSError(self._name)


class InLoop:
    def __init__(self, name: str, fails: bool = False) -> None:
        self._name, self._fails = name, fails
        self.loop: asyncio.AbstractEventLoop | None = None

    async def aclose(self) -> None:
        self.loop = asyncio.get_running_loop()
        CLOSED.append(self._name)
        if self._fails:
            raise OSError(self._name)


class Things(containers.DeclarativeContainer):
    processes = providers.Resource(closed_at_end, AtEnd, "processes")
    model = providers.Resource(closed_at_end, AtEnd, "model", processes)
    unused = providers.Resource(closed_at_end, AtEnd, "unused")
    server = LoopResource(InLoop, "server")
    unused_server = LoopResource(InLoop, "unused server")
    used = providers.Selector(lambda: "model", model=providers.List(model, server), none=unused)


@pytest.fixture(autouse=True)
def nothing_closed() -> None:
    CLOSED.clear()


async def use(things: Things) -> str:
    things.used()
    assert CLOSED == []
    return "done"


async def test_each_is_closed_once_before_what_it_was_made_from_and_only_if_it_was_made() -> None:
    things = Things()
    assert await closing(use(things), things) == "done"
    assert CLOSED == ["server"]
    shut_down(things)
    shut_down(things)
    assert CLOSED == ["server", "model", "processes"]


async def test_what_belongs_to_the_loop_is_closed_when_the_work_fails() -> None:
    things = Things()

    async def failing() -> None:
        await use(things)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        await closing(failing(), things)
    assert CLOSED == ["server"]
    shut_down(things)


async def test_one_that_cannot_be_closed_leaves_none_open() -> None:
    things = Things()
    things.model.override(providers.Resource(closed_at_end, AtEnd, "broken", things.processes, fails=True))
    things.server.override(LoopResource(InLoop, "broken server", fails=True))
    with pytest.raises(OSError, match="broken server"):
        await closing(use(things), things)
    with pytest.raises(OSError, match="broken"):
        shut_down(things)
    assert CLOSED == ["broken server", "broken", "processes"]


@pytest.mark.parametrize("kind", [AtEnd, InLoop])
async def test_what_the_caller_gave_is_closed_like_what_was_made(kind: type) -> None:
    things = Things()
    things.model.override(given(kind("mine")))
    await closing(use(things), things)
    shut_down(things)
    assert sorted(CLOSED) == ["mine", "server"]


class Both(AtEnd):
    async def aclose(self) -> None:
        CLOSED.append("aclose")


async def test_both_ways_of_closing_are_used() -> None:
    things = Things()
    things.model.override(given(Both("close")))
    await closing(use(things), things)
    shut_down(things)
    assert sorted(CLOSED) == ["aclose", "close", "server"]


def test_an_error_is_told_also_by_a_gpu_that_it_has_left_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    @gives_memory_back
    def work() -> None:
        raise EngineError("A sampled token is none of the vocabulary.")

    monkeypatch.setattr(allocator, "give_back_freed_memory", broken)
    with pytest.raises(EngineError):
        work()
