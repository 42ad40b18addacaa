"""An agent that is a Python function."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask

THREADS = 256
"""Blocking agents that play at once; they wait for replies most of the time."""


class FunctionAgent(AgentProgram):
    """Calls `function(task)`, which may be asynchronous; one that blocks runs in a thread.

    It returns its answer (a text), its reward (a number), a mapping with `answer`, `reward` and `metrics`, or None: the
    last reply is the answer then. A blocking function that is cancelled keeps its thread until it returns; its session
    answers no more.
    """

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`.

        Raises:
            TypeError, ValueError: the function returned something else.
        """
        if inspect.iscoroutinefunction(self._function):
            return _result(await self._function(task))
        return _result(await asyncio.get_running_loop().run_in_executor(self._threads, self._function, task))


def _result(value: Any) -> AgentResult:
    if isinstance(value, Mapping):
        unknown = value.keys() - {"answer", "reward", "metrics"}
        if unknown:
            raise ValueError(f"the agent returned {sorted(unknown)}, but a mapping has answer, reward and metrics")
        reward = value.get("reward")
        return AgentResult(
            answer=value.get("answer"),
            reward=None if reward is None else _finite(reward),
            metrics={str(name): _finite(number) for name, number in (value.get("metrics") or {}).items()},
        )
    if value is None or isinstance(value, str):
        return AgentResult(answer=value)
    return AgentResult(reward=_finite(value))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the agent returned {number}, but rewards and metrics are finite numbers")
    return number
