"""Repair of calls that vLLM 0.32 makes of several workers of an engine, where one fails.

vLLM reads their answers by rank up to the first error, and takes those that it has not read for answers to the next
calls: from then on it goes on before all workers have done what they were asked, and a bucket of weights is written
again while one of them still reads it.
Does not own: the calls.
"""

from collections.abc import Iterator
from typing import Any


def repair() -> None:
    """Repairs the calls of engines of this process."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    ask = MultiprocExecutor.collective_rpc

    def asked(executor: Any, *arguments: Any, **settings: Any) -> Any:
        if not isinstance(executor.response_mqs, Answers):
            executor.response_mqs = Answers(executor.response_mqs)
        return ask(executor, *arguments, **settings)

    MultiprocExecutor.collective_rpc = asked


class Answers(list[Any]):
    """The queues of the answers of all workers, by rank. Who goes through them has read all answers with the first
    error."""

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the queues of a call that all workers answer."""
        return (_Queue(self[rank], self[rank + 1 :]) for rank in range(len(self)))


class _Queue:
    """A worker's queue, and those that are read after it."""

    def __init__(self, queue: Any, following: list[Any]) -> None:
        self._queue, self._following = queue, following

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, **settings: Any) -> Any:
        """Returns the worker's answer."""
        from vllm.v1.executor.multiproc_executor import WorkerProc

        status, answer = self._queue.dequeue(**settings)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            for queue in self._following:
                queue.dequeue(**settings)
        return status, answer
