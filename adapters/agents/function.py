"""An agent that is a Python function."""

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask


class FunctionAgent(AgentProgram):
    """Calls `function(task)`, which may be asynchronous; one that blocks runs in a thread of its own.

    It returns its answer (a text), its reward (a number), a mapping with `answer`, `reward` and `metrics`, or None: the
    last reply is the answer then. A blocking function that is cancelled keeps its thread until it returns; its session
    answers no more.
    """

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`.

        Raises:
            TypeError, ValueError: the function returned something else.
            RuntimeError: it called `sys.exit`, which must not end the training run.
        """
        try:
            asynchronous = inspect.iscoroutinefunction(self._function)
            value = self._function(task) if asynchronous else await _in_thread(self._function, task)
            return _result(await value if inspect.isawaitable(value) else value)
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error


async def _in_thread(function: Callable[[AgentTask], Any], task: AgentTask) -> Any:
    """What `function` returns, called in a daemon thread: one that never returns does not keep the process alive."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def call() -> None:
        value: Any = None
        failed: BaseException | None = None
        try:
            value = function(task)
        except StopIteration as error:  # a future cannot carry it
            failed = RuntimeError(f"it raised {error!r}")
        except BaseException as error:  # whatever it is, the caller waits for it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=call, name="agent", daemon=True).start()
    return await answer


def _result(value: Any) -> AgentResult:
    if isinstance(value, Mapping):
        unknown = value.keys() - {"answer", "reward", "metrics"}
        if unknown:
            raise ValueError(f"the agent returned {sorted(unknown)}, but a mapping has answer, reward and metrics")
        answer, reward = value.get("answer"), value.get("reward")
        if not isinstance(answer, str | None):
            raise TypeError(f"the agent returned the answer {answer!r}, but answers are texts")
        return AgentResult(
            answer=answer,
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
