"""`JudgePool`: judgements that may hang, in processes that can be killed.

Invariant: a judgement over its deadline costs one worker, which is killed and replaced; the others go on. Workers are
spawned, because forking a process whose torch threads hold locks can deadlock. Does not own: what is judged.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import structlog
from attrs import frozen

from rollgrad.domain.errors import RewardError

MAX_WORKERS = 8
"""Judgements take milliseconds: more processes only cost memory."""
CLOSE_SECONDS = 5.0
"""Longest wait for killed workers to be gone."""


POLL_SECONDS = 5.0
"""Between looks at whether the pool still runs, while a judgement is out."""


class _PoolBrokenError(Exception):
    """The pool, not the judgement, broke down; a new pool may answer."""


@frozen(kw_only=True)
class Verdict:
    """`value`, or why there is none: the deadline passed (`timed_out`) or the judge broke down (`failed`)."""

    value: float = 0.0
    timed_out: bool = False
    failed: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        """Shares of judgements without a value, for the log."""
        return {"judge_timed_out": float(self.timed_out), "judge_failed": float(self.failed)}


_log = structlog.get_logger()
_preparation_lock = threading.Lock()


class _BareProcess(SpawnProcess):
    """A spawned process that does not import the caller's main script again.

    The script would cost each worker seconds and memory (torch), and start over where it has no `__main__` guard.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _preparation_lock:
            complete = spawn.get_preparation_data

            def without_main(name: str) -> dict[str, Any]:
                return {key: value for key, value in complete(name).items() if not key.startswith("init_main")}

            spawn.get_preparation_data = without_main
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                spawn.get_preparation_data = complete


class _BareSpawnContext(SpawnContext):
    Process = _BareProcess


class JudgePool:
    """Processes that judge, each call within `timeout` seconds; `warm_up` runs first in each (imports).

    Functions cross processes: they must be importable (not defined in a script), and their modules cheap to import.
    """

    def __init__(self, *, timeout: float, warm_up: Callable[[], None]) -> None:
        self._timeout = timeout
        self._warm_up = warm_up
        self._closed = False
        self._pool = self._start()

    async def judge(self, func: Callable[..., float], *args: Any) -> Verdict:
        """What `func(*args)` says; an exception in it, and the death of its process, count as `failed`.

        Raises:
            RewardError: `func` raised it, the pool is closed, or its processes cannot start.
        """
        try:
            try:
                return await self._judge(func, args)
            except _PoolBrokenError as error:
                _log.warning("judge_pool_restarted", error=str(error))
                return await self._judge(func, args)
        except _PoolBrokenError as error:
            raise RewardError(f"The reward's worker processes are not running: {error}.") from error

    def _start(self) -> Any:
        from pebble import ProcessPool

        pool = ProcessPool(
            max_workers=max(2, min(MAX_WORKERS, (os.cpu_count() or 2) // 2)),
            context=_BareSpawnContext(),
            initializer=self._warm_up,
        )
        # The first call starts the processes: they import while the models load.
        pool.schedule(float)
        return pool

    async def _judge(self, func: Callable[..., float], args: tuple[Any, ...]) -> Verdict:
        if not self._closed and not self._pool.active:
            self._pool = self._start()
        pool = self._pool
        try:
            future = asyncio.wrap_future(pool.schedule(func, args=args, timeout=self._timeout))
        except RuntimeError as error:
            raise _PoolBrokenError(str(error)) from error
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=POLL_SECONDS)
                if not future.done() and not pool.active:  # nobody would ever answer
                    raise _PoolBrokenError("the pool broke down")
            return Verdict(value=future.result())
        except TimeoutError:
            return Verdict(timed_out=True)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except (RewardError, _PoolBrokenError):
            raise
        except BrokenProcessPool as error:
            raise _PoolBrokenError(f"they ended: {error} (their output tells why)") from error
        except Exception as error:  # whatever the judge raises, on some strange reply, costs this verdict only
            _log.warning("judge_failed", judge=func.__name__, error=repr(error))
            return Verdict(failed=True)

    def close(self) -> None:
        """Kills the processes; idempotent."""
        self._closed = True
        self._pool.stop()
        self._pool.join(CLOSE_SECONDS)
