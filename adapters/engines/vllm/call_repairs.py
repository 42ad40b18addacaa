"""Repairs of calls that vLLM 0.32 makes of an engine's workers, where one fails.

vLLM reads the answers of several workers by rank, up to the first error. It takes answers that it has not read for
answers to later calls. From then on it does not wait until all workers have done what they were asked, and a bucket of
weights is overwritten while a worker still reads it. A worker that has gone to sleep raises an error if the GPU has
less free memory than before because another process has taken some meanwhile. vLLM then counts the worker as awake,
never wakes it, and computes in memory that is gone.

Does not own: the calls.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from functools import wraps
from typing import Any

REST_SECONDS = 30.0
"""Longest wait for the answers of other workers once one has failed: they may never come, as of one that waits for the
failed one in an exchange."""

GREW = "Memory usage increased after sleeping."
"""Error of a worker that sleeps already: it has only to report its memory after that."""

log = logging.getLogger(__name__)


def repair() -> None:
    """Repairs the calls of engines of this process."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    ask = MultiprocExecutor.collective_rpc

    def asked(executor: Any, *arguments: Any, **settings: Any) -> Any:
        if not isinstance(executor.response_mqs, Answers):
            executor.response_mqs = Answers(executor, executor.response_mqs)
        return ask(executor, *arguments, **settings)

    MultiprocExecutor.collective_rpc = asked


def repair_sleep() -> None:
    """Repairs how a worker of this process goes to sleep; may be called again."""
    from vllm.v1.worker.gpu_worker import Worker

    sleep = Worker.sleep
    if hasattr(sleep, "__wrapped__"):
        return

    @wraps(sleep)
    def asleep(worker: Any, level: int = 1) -> None:
        try:
            sleep(worker, level)
        except AssertionError as error:
            if str(error) != GREW:
                raise
            log.warning("another process has taken memory of the GPU while vLLM went to sleep")

    Worker.sleep = asleep


class Answers(list[Any]):
    """The queues of the answers of all workers of `executor`, by rank. Who goes through them has read all answers with
    the first error, or the executor has failed."""

    def __init__(self, executor: Any, queues: Iterable[Any]) -> None:
        super().__init__(queues)
        self.executor = executor

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the queues of a call that all workers answer."""
        return (_Queue(self, rank) for rank in range(len(self)))


class _Queue:
    """A worker's queue, and those that are read after it."""

    def __init__(self, answers: Answers, rank: int) -> None:
        self._answers, self._queue, self._following = answers, answers[rank], answers[rank + 1 :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, **settings: Any) -> Any:
        """Returns the worker's answer."""
        from vllm.v1.executor.multiproc_executor import WorkerProc

        status, answer = self._queue.dequeue(**settings)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            until = time.monotonic() + REST_SECONDS
            try:
                for queue in self._following:
                    queue.dequeue(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._answers.executor.is_failed = True  # nothing can be asked any more
        return status, answer
