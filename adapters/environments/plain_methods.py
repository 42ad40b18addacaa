"""Environments of users whose methods are plain functions: those run in a thread of the episode's own, so that one that
computes or waits holds up no other episode."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from rollgrad.adapters.environments.episode_thread import CLOSE_SECONDS, EpisodeThread
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import (
    ENVIRONMENT_METHODS,
    Environment,
    Observation,
    StepResult,
    Tool,
    offered,
)


class PlainEnvironment(Environment):
    """Calls the plain methods of `inner` in one thread, one after the other, and awaits its asynchronous ones. The
    episode's own limit of time (`rollout.max_episode_seconds`) is that of each call."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._thread = EpisodeThread(type(inner).__name__, timeout=None)

    @property
    def tools(self) -> Sequence[Tool]:
        """The inner environment's, which may have none."""
        return offered(self._inner, "tools", ())

    @property
    def acting_role(self) -> str:
        """The inner environment's, which may have no roles."""
        return offered(self._inner, "acting_role", "")

    async def reset(self, prompt: Prompt) -> Observation:
        """Implements `Environment.reset`."""
        observation: Observation = await self._call("reset", prompt)
        return observation

    async def step(self, action: Action) -> StepResult:
        """Implements `Environment.step`."""
        result: StepResult = await self._call("step", action)
        return result

    async def close(self) -> None:
        """Implements `Environment.close`; an earlier call that does not end keeps its thread.

        Raises:
            TimeoutError: `close`, with such a call, takes too long.
        """
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._call("close")
        finally:
            await self._thread.close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._inner, name)
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        result = await self._thread.call(name, lambda: method(*arguments))
        return await result if inspect.isawaitable(result) else result


def awaitable_environment(inner: Any) -> Environment:
    """Returns an environment as it is if its methods are asynchronous, else one that calls its plain ones."""
    if all(inspect.iscoroutinefunction(getattr(inner, name, None)) for name in ENVIRONMENT_METHODS):
        made: Environment = inner
        return made
    return PlainEnvironment(inner)
