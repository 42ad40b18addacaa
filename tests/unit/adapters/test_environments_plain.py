"""Environments whose methods are plain functions play episodes as others do."""

import asyncio
import threading
from typing import Any

import pytest

from rollgrad.adapters.environments import plain_methods
from rollgrad.adapters.environments.plain_methods import awaitable_environment
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, OffersTools, StepResult, offered
from rollgrad.testing.environment import FakeEnvironment
from tests.contract.test_environment import act

PROMPT = Prompt(token_ids=(1,), text="Play.", label="7", messages=None, metadata={})


class Meeting:
    """An environment whose step waits until another episode has come as far."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both
        self.threads: list[int] = []

    def reset(self, prompt: Prompt) -> str:
        self.threads.append(threading.get_ident())
        return prompt.label or ""

    def step(self, action: Any) -> StepResult:
        self.threads.append(threading.get_ident())
        self._both.wait(timeout=60)
        return StepResult(terminated=True)

    def close(self) -> None:
        self.threads.append(threading.get_ident())


async def test_episodes_that_wait_hold_up_no_other_and_have_a_thread_each() -> None:
    both = threading.Barrier(2)
    worlds = [Meeting(both) for _ in range(2)]

    async def play(world: Meeting) -> StepResult:
        environment = awaitable_environment(world)
        assert await environment.reset(PROMPT) == "7"
        try:
            return await environment.step(act("?"))
        finally:
            await environment.close()

    assert [result.terminated for result in await asyncio.gather(*map(play, worlds))] == [True, True]
    first, second = (set(world.threads) for world in worlds)
    assert len(first) == len(second) == 1
    assert not (first | second) & {threading.get_ident()}


async def test_methods_of_either_kind_may_be_mixed() -> None:
    class Mixed(Meeting):
        def __init__(self) -> None:
            super().__init__(threading.Barrier(1))

        async def reset(self, prompt: Prompt) -> str:  # type: ignore[override]
            return "awaited"

        def close(self) -> Any:
            return asyncio.sleep(0)  # a plain function that returns what is awaited

    environment = awaitable_environment(Mixed())
    assert await environment.reset(PROMPT) == "awaited"
    assert (await environment.step(act("?"))).terminated
    await environment.close()
    await environment.close()


async def test_an_error_is_the_environments_own() -> None:
    class Broken(Meeting):
        def step(self, action: Any) -> StepResult:
            raise TimeoutError("of the game")

    environment = awaitable_environment(Broken(threading.Barrier(1)))
    await environment.reset(PROMPT)
    with pytest.raises(TimeoutError, match=r"^of the game$"):
        await environment.step(act("?"))
    await environment.close()


def test_tools_are_offered_where_there_are_some_and_asynchronous_environments_are_left_alone() -> None:
    meeting: Any = Meeting(threading.Barrier(1))
    offering = awaitable_environment(meeting)
    assert isinstance(offering, OffersTools)
    assert tuple(offering.tools) == ()
    meeting.tools = ("calculator",)
    assert tuple(offering.tools) == ("calculator",)
    asynchronous: Environment = FakeEnvironment([])
    assert awaitable_environment(asynchronous) is asynchronous


def test_what_a_wrapper_passes_on_is_offered() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    meeting: Any = Meeting(threading.Barrier(1))
    for environment in (Wrapper(meeting), awaitable_environment(Wrapper(meeting))):
        assert offered(environment, "tools", ()) == ()
        assert offered(environment, "acting_role", "") == ""
    meeting.tools, meeting.acting_role = ("calculator",), "black"
    for environment in (Wrapper(meeting), awaitable_environment(Wrapper(meeting))):
        assert offered(environment, "tools", ()) == ("calculator",)
        assert offered(environment, "acting_role", "") == "black"


async def test_a_call_that_does_not_end_keeps_its_thread_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_methods, "CLOSE_SECONDS", 0.05)
    ends = threading.Event()

    class Hanging(Meeting):
        def step(self, action: Any) -> StepResult:
            ends.wait()
            return StepResult()

    environment = awaitable_environment(Hanging(threading.Barrier(1)))
    await environment.reset(PROMPT)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await environment.step(act("?"))
    with pytest.raises(TimeoutError):
        await environment.close()
    ends.set()
