"""Processes that hold the parts of one model and make every call together.

Invariants: a call is made on all of them or on none, and such calls of several threads follow each other; each ends
within its deadline, with all results or one error that names the process; after a process was lost the group is ended,
and every later call says why.
Does not own: what the processes compute.
"""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rollgrad.adapters.ray.placement import Slot
from rollgrad.adapters.ray.session import ray_module
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.domain.errors import RollgradError, WorkerError

GRACE_SECONDS = 30.0
"""After the first failure, for the death which is its cause: the others fail because a process has left them."""

NO_MEMORY = (
    "Ray ended it as its machine was about to run out of memory: lower --train.max_tokens_per_micro_batch, or give the "
    "model more processes; --dry_run says what each of them holds"
)

PASSES = frozenset({"score", "values", "update"})
"""Methods of models that go through all layers, and leave much memory free."""


class RankWorker:
    """What runs in each process. One of a group of `size`; `threads` are for torch."""

    def __init__(self, rank: int, size: int, threads: int) -> None:
        gc.disable()  # libraries that load, until `build`, leave no garbage; to look for it takes a quarter longer
        import torch

        torch.set_num_threads(threads)
        self._rank, self._size = rank, size
        self._model: Any = None
        self._store: Any = None
        """Of `listen`: it ends with this process."""

    def address(self) -> tuple[str, int]:
        """(host, free port) of this process."""
        from ray.util import get_node_ip_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return str(get_node_ip_address()), int(listener.getsockname()[1])

    def listen(self) -> tuple[str, int]:
        """(host, port) of a store in this process, at which all of the group find each other: its port is its own from
        now on, while libraries load."""
        from ray.util import get_node_ip_address
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = str(get_node_ip_address())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, int(self._store.port)

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def join(self, host: str, port: int, timeout: float) -> None:
        """Makes the group."""
        from rollgrad.adapters.models.deepspeed.module import start_process_group

        local = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") else self._rank
        start_process_group(rank=self._rank, size=self._size, host=host, port=port, local_rank=local, timeout=timeout)

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model that later calls are made on."""
        try:
            self._model = make(*arguments)
        finally:
            gc.enable()
        self._rest()

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns a method of the model."""
        try:
            return getattr(self._model, method)(*arguments)
        finally:
            if method in PASSES:
                self._rest()

    def _rest(self) -> None:
        """Models take turns on a machine: what one leaves free, others need."""
        from rollgrad.adapters.models.torch.allocator import give_back_freed_memory

        give_back_freed_memory()


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
        self._turn = threading.RLock()
        """Held for a call of all processes, and for each item of a reading."""
        self._reading: object | None = None
        """Stands for the reading that is under way."""
        self._end_reading: Callable[[], object] = lambda: None
        """Ends it in all processes."""
        self._beside: dict[int, Any] = {}
        """Rank: the call by which it takes part in the reading."""
        remote = ray.remote(RankWorker)
        self._workers = [
            remote.options(**slot.options(), max_restarts=0).remote(rank, self.size, threads)
            for rank, slot in enumerate(slots)
        ]
        with self._waiting("start"):
            host, port = self._gather({0: self._workers[0].listen.remote()}, "answering")[0]
        with self._waiting("join one group"):
            self._everywhere("finding each other", lambda worker: worker.join.remote(host, port, timeout))

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model, by an importable function, in all processes."""
        with self._waiting("load the model"):
            self._everywhere("loading the model", lambda worker: worker.build.remote(make, *arguments))

    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [int(pid) for pid in self._everywhere("answering", lambda worker: worker.pid.remote())]

    def address(self) -> tuple[str, int]:
        """(host, free port) of the first process."""
        host, port = self._gather({0: self._workers[0].address.remote()}, "answering")[0]
        return str(host), int(port)

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the model with arguments of its own in each process; results by rank.

        Raises:
            RollgradError: what the method raised, of the lowest rank.
            WorkerError: a process was lost, or they did not answer in time.
        """
        with self._turn:
            self._require_whole()
            self._stop_reading()
            calls = zip(self._workers, arguments, strict=True)
            return self._gather({rank: w.call.remote(method, *own) for rank, (w, own) in enumerate(calls)}, method)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """The same with equal arguments, which are sent once."""
        ray = ray_module()
        shared = [ray.put(argument) for argument in arguments]
        return self.each(method, [shared] * self.size)

    def begin(self, method: str, ranks: Sequence[int], *arguments: Any) -> Callable[[], list[Any]]:
        """Starts a call in some processes; what is returned waits for the results."""
        workers = self._workers  # which another thread may empty, as it finds one lost
        self._require_whole()
        references = {rank: workers[rank].call.remote(method, *arguments) for rank in ranks}
        return lambda: self._gather(references, method)

    def read(
        self, begin: str, *arguments: Any, ranks: Sequence[int], following: str, rest: str, others: str
    ) -> Iterator[list[Any]]:
        """What `following` gives in the processes `ranks`, until it is None, after `begin` with its arguments; the
        others take part by one long call, `others`.

        A call of all processes ends a reading: `ranks` then go through the `rest`, as they do if the reading is closed.

        Raises:
            WorkerError: another call has ended the reading, a process was lost, or they did not answer in time.
        """
        reading = object()
        with self._turn:
            self._require_whole()
            self._stop_reading()
            taking_part = [rank for rank in range(self.size) if rank not in ranks]
            self._beside = {rank: self._workers[rank].call.remote(others) for rank in taking_part}
            self._reading, self._end_reading = reading, self._ender(rest, ranks)
            self.begin(begin, ranks, *arguments)()
        try:
            while True:
                with self._turn:
                    self._require_whole()
                    if self._reading is not reading:
                        raise WorkerError(
                            f"The {self.name} was asked for something else while its weights were on their way, which "
                            "ends the transfer: push again."
                        )
                    items = self.begin(following, ranks)()
                if items[0] is None:
                    return
                yield items
        finally:
            if self._reading is reading:  # whoever reads has given up, but the other processes wait for the rest
                with self._turn:
                    if self._reading is reading:
                        self._stop_reading()

    def close(self) -> None:
        """Ends the processes; may be called again."""
        ray = ray_module()
        for worker in self._workers:
            if ray.is_initialized():
                ray.kill(worker)
        self._workers = []

    def _waiting(self, doing: str) -> AbstractContextManager[None]:
        processes = "process" if self.size == 1 else "processes"
        return waiting_for(f"{self.size} {processes} of {self.name} to {doing}", deadline=self._timeout)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise WorkerError(self._broken)

    def _ender(self, rest: str, ranks: Sequence[int]) -> Callable[[], object]:
        def end() -> None:
            others, self._beside = self._beside, {}
            last = {rank: self._workers[rank].call.remote(rest) for rank in ranks}
            self._gather(last | others, rest)

        return end

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading = None
            self._end_reading()

    def _everywhere(self, doing: str, call: Callable[[Any], Any]) -> list[Any]:
        return self._gather({rank: call(worker) for rank, worker in enumerate(self._workers)}, doing)

    def _gather(self, references: Mapping[int, Any], doing: str) -> list[Any]:
        """Returns the results of `references`, by rank; a process that fails in its part of a reading is heard, too."""
        ray = ray_module()
        ranks = {reference: rank for rank, reference in [*self._beside.items(), *references.items()]}
        wanted, results = set(references.values()), dict[Any, Any]()
        failures: dict[int, Exception] = {}
        until = time.monotonic() + self._timeout
        while wanted or (failures and ranks):
            done, _ = ray.wait(list(ranks), timeout=max(0.0, until - time.monotonic()))
            if not done:
                break
            for reference in done:
                rank = ranks.pop(reference)
                wanted.discard(reference)
                try:
                    results[reference] = ray.get(reference)
                except Exception as error:  # whatever the process raised: it is judged beside the others'
                    failures[rank] = error
                    until = 0.0 if _is_death(error) else min(until, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise self._judged(failures, doing)
        if wanted:
            raise self._end(f"did not answer within {self._timeout:g} s", sorted(ranks.values()), doing)
        return [results[reference] for reference in references.values()]

    def _judged(self, failures: dict[int, Exception], doing: str) -> Exception:
        """Returns the error that tells most: of a process that died, else what one raised on purpose, else anything."""
        if dead := [rank for rank, error in failures.items() if _is_death(error)]:
            if any(_is_lack_of_memory(failures[rank]) for rank in dead):
                return self._end(f"died ({NO_MEMORY})", dead, doing)
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
            "again with --ckpt.resume, which continues from the last training state (--ckpt.state_minutes)."
        )
        self._reading, self._beside = None, {}
        self.close()
        return WorkerError(self._broken)


def _is_death(error: Exception) -> bool:
    """Returns whether a process is gone, rather than its call has raised something."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _is_lack_of_memory(error: Exception) -> bool:
    """Returns whether Ray ended a process before its machine's memory was full."""
    from ray.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)
