"""Processes that hold the parts of one model and make every call together.

Invariants: a call is made on all of them or on none; it ends within its deadline, with all results or one error that
names the process; after a process was lost the group is ended, and every later call says why.
Does not own: what the processes compute.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.ray.placement import Slot
from rollgrad.adapters.ray.session import ray_module
from rollgrad.domain.errors import RollgradError, WorkerError

GRACE_SECONDS = 30.0
"""After the first failure, for that of the process which is its cause: the others fail because it has left them."""


class RankWorker:
    """What runs in each process. One of a group of `size`; `threads` are for torch."""

    def __init__(self, rank: int, size: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._rank, self._size = rank, size
        self._model: Any = None

    def address(self) -> tuple[str, int]:
        """(host, free port) of this process, at which the others find it."""
        from ray.util import get_node_ip_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return str(get_node_ip_address()), int(listener.getsockname()[1])

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def join(self, host: str, port: int, timeout: float) -> None:
        """Makes the group."""
        from rollgrad.adapters.deepspeed.module import start_process_group

        local = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") else self._rank
        start_process_group(rank=self._rank, size=self._size, host=host, port=port, local_rank=local, timeout=timeout)

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model that later calls are made on."""
        self._model = make(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the model."""
        return getattr(self._model, method)(*arguments)


class WorkerGroup:
    """See the module.

    Args:
        name: of the role, for errors and for Ray's own views.
        slots: where each process runs.
        threads: of torch in each.
        timeout: seconds that any call may take.

    Raises:
        WorkerError: a process did not start.
    """

    def __init__(self, name: str, slots: Sequence[Slot], *, threads: int, timeout: float) -> None:
        ray = ray_module()
        self.name = name
        self.size = len(slots)
        self._timeout = timeout
        self._broken: str | None = None
        remote = ray.remote(RankWorker)
        self._workers = [
            remote.options(**slot.options(), max_restarts=0).remote(rank, self.size, threads)
            for rank, slot in enumerate(slots)
        ]
        host, port = self.address()
        self._gather([worker.join.remote(host, port, timeout) for worker in self._workers], "finding each other")

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model, by an importable function, in all processes."""
        self._gather([worker.build.remote(make, *arguments) for worker in self._workers], "loading the model")

    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [int(pid) for pid in self._gather([worker.pid.remote() for worker in self._workers], "answering")]

    def address(self) -> tuple[str, int]:
        """(host, free port) of the first process."""
        host, port = self._gather([self._workers[0].address.remote()], "answering")[0]
        return str(host), int(port)

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the model with arguments of its own in each process; results by rank.

        Raises:
            RollgradError: what the method raised, of the lowest rank.
            WorkerError: a process was lost, or they did not answer in time.
        """
        self._require_whole()
        references = [worker.call.remote(method, *own) for worker, own in zip(self._workers, arguments, strict=True)]
        return self._gather(references, method)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """The same with equal arguments, which are sent once."""
        ray = ray_module()
        shared = [ray.put(argument) for argument in arguments]
        return self.each(method, [shared] * self.size)

    def begin(self, method: str, ranks: Sequence[int], *arguments: Any) -> Callable[[], list[Any]]:
        """Starts a call in some processes; what is returned waits for the results."""
        self._require_whole()
        references = [self._workers[rank].call.remote(method, *arguments) for rank in ranks]
        return lambda: self._gather(references, method, ranks)

    def close(self) -> None:
        """Ends the processes; may be called again."""
        ray = ray_module()
        for worker in self._workers:
            if ray.is_initialized():
                ray.kill(worker)
        self._workers = []

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise WorkerError(self._broken)

    def _gather(self, references: list[Any], doing: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Results in the order of `references`, which are of the processes `ranks` (default: of all)."""
        ray = ray_module()
        ranks = range(len(references)) if ranks is None else ranks
        waiting, left = list(references), self._timeout
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        while waiting:
            done, waiting = ray.wait(waiting, timeout=left)
            if not done:
                break
            for reference in done:
                rank = ranks[references.index(reference)]
                try:
                    results[rank] = ray.get(reference)
                except Exception as error:  # whatever the process raised: it is judged beside the others'
                    failures[rank] = error
                    left = GRACE_SECONDS
        if failures:
            raise self._judged(failures, doing)
        if waiting:
            slow = [ranks[references.index(reference)] for reference in waiting]
            raise self._end(f"did not answer within {self._timeout:g} s", slow, doing)
        return [results[rank] for rank in ranks]

    def _judged(self, failures: dict[int, Exception], doing: str) -> Exception:
        """The error that tells most: of a process that died, else what one raised on purpose, else anything."""
        from ray.exceptions import RayActorError

        dead = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        if dead:
            return self._end("died", dead, doing)
        rank, error = min(failures.items())
        cause = getattr(error, "cause", None)
        if isinstance(cause, RollgradError):
            return cause
        return self._end(f"failed ({type(cause or error).__name__}: {str(cause or error)[:300]})", [rank], doing)

    def _end(self, what: str, ranks: Sequence[int], doing: str) -> WorkerError:
        if self._broken is not None:  # the processes of this call were ended because another call had lost one
            return WorkerError(self._broken)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        self._broken = (
            f"Of the {self.size} training processes of {self.name}, {who} {what} while {doing!r} was under way. Start "
            "again with --ckpt.resume if the run saves its state (--ckpt.state_steps)."
        )
        self.close()
        return WorkerError(self._broken)
