"""`EpisodeThread` runs the blocking calls of one environment in one thread, each with a deadline.

Invariant: calls run in order and never at the same time. A call that exceeds its deadline keeps its thread, which is a
daemon and so delays neither the run nor its end. Does not own: the calls.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from rollgrad.application.foreign import error_text, harmless

CLOSE_SECONDS = 5.0
"""Longest wait for an environment to release its resources."""

log = structlog.get_logger(__name__)
Result = TypeVar("Result")
_Job = tuple[Future[Any], Callable[[], Any]]


class EpisodeThread:
    """Runs calls of the environment `name` (for messages), each within `timeout` seconds, if there is such a limit.

    The thread starts with the first call and ends with `close`.
    """

    def __init__(self, name: str, *, timeout: float | None) -> None:
        self._name = name
        self._timeout = timeout
        self._jobs: SimpleQueue[_Job | None] | None = None

    async def call(self, what: str, func: Callable[[], Result]) -> Result:
        """Returns or raises what `func()` does; `what` names the call in errors.

        Raises:
            TimeoutError: it took longer than the deadline, including the wait for earlier calls.
        """
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                result: Result = await self._submit(func)
                return result
        except TimeoutError as error:
            if self._timeout is None or not deadline.expired():  # the environment raised this TimeoutError itself
                raise
            raise TimeoutError(f"{self._name} did not finish {what} within {self._timeout:g} s.") from error

    async def close(self, world: Callable[[], Any] | None = None) -> None:
        """Closes what `world()` is after all calls, if that can be closed, and ends the thread; idempotent. Errors are
        only logged: the episode is over anyway."""
        if self._jobs is None:
            return
        try:
            if world is not None:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._submit(lambda: getattr(world(), "close", lambda: None)())
        except Exception as error:
            log.warning("environment_close_failed", environment=self._name, error=error_text(error))
        finally:
            jobs, self._jobs = self._jobs, None
            if jobs is not None:
                jobs.put(None)

    async def _submit(self, func: Callable[[], Any]) -> Any:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name=f"environment-{self._name}", daemon=True).start()
        future: Future[Any] = Future()
        self._jobs.put((future, func))
        return await asyncio.wrap_future(future)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, func = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(func())
            except BaseException as error:  # of any kind: the caller waits for an outcome
                future.set_exception(harmless(error))
