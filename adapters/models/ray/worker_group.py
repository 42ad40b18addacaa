"""Processes that hold the parts of one model and make every call together.

Invariants:

- A call is made in all of them or in none; calls of several threads run one after another.
- Each call ends within its deadline and `GRACE_SECONDS`, with all results or one error that names the process.
- After the loss of a process the group is ended, and every later call raises the reason.

Does not own: the computation.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import structlog
from attrs import define

from rollgrad.adapters.models.ray.rank_worker import end_workers, start_by_deepspeed
from rollgrad.adapters.ray.session import machine, ray_module, require_raylet
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.domain.errors import START_AGAIN, CheckpointError, LostProcessError, RollgradError, WorkerError

log = structlog.get_logger(__name__)

GRACE_SECONDS = 30.0
"""Seconds after an exchange that failed, or after the deadline, in which the cause may be noticed: the death of a
process, or which of them is silent. Other processes fail only because one has left them."""

CAUSE_SECONDS = 5.0
"""Seconds after a failure that is none of an exchange, in which the others may fail, too, or end."""

TELL_SECONDS = 300.0
"""Seconds between two lines of the log that name the processes which have not answered yet. All of them are silent as
long as one does not take part in an exchange, up to the deadline."""

NO_MEMORY = (
    "Ray ended it as its machine was about to run out of memory: lower --train.max_tokens_per_micro_batch, or give the "
    "model more processes; --dry_run says what each of them holds"
)

LOG = "/tmp/ray/session_*/logs/worker-*-{pid}.err"
"""File in which Ray keeps what a process writes, unless it was started with another directory for temporary files."""

NAMED = 2
"""Largest number of logs that an error names."""


class WorkerGroup:
    """Joins the processes of one model, and makes calls of them.

    Args:
        name: name of the role, for errors and for Ray's own views.
        workers: the processes, as `begin_workers` returns them.
        timeout: seconds that any call may take.
        start: importable function by which each process joins the group.

    Raises:
        WorkerError: a process did not start.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Any],
        *,
        timeout: float,
        start: Callable[..., None] = start_by_deepspeed,
    ) -> None:
        self.name = name
        self.size = len(workers)
        self.timeout = timeout
        """Seconds that any call may take."""
        self._broken: WorkerError | None = None
        self._turn = threading.RLock()
        """Lock of one call of all processes, or of one item of a reading."""
        self._reading: object | None = None
        """Token of the current reading; None if there is none."""
        self._end_reading: Callable[[], object] = lambda: None
        """Ends the current reading in all processes."""
        self._participants: dict[int, Any] = {}
        """Calls by which the other processes take part in the reading, by rank."""
        self._workers = [*workers]
        self.pids: list[int] = []
        """Ids of the processes, by rank."""
        with self._waiting("start"):
            host, port = self._gather({0: self._workers[0].listen.remote()}, "answering")[0]
        with self._waiting("join one group"):
            self.pids = self._call_all("finding each other", lambda w: w.join.remote(host, port, timeout, start))

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model, by an importable function, in all processes."""
        with self._waiting("load the model"):
            self._call_all("loading the model", lambda worker: worker.build.remote(make, *arguments))

    def on_this_machine(self) -> bool:
        """Returns whether all processes are on the machine of this one."""
        return set(self._call_all("answering", lambda worker: worker.machine.remote())) == {machine()}

    def address(self) -> tuple[str, int]:
        """Returns the host and a free port of the first process."""
        host, port = self._gather({0: self._workers[0].address.remote()}, "answering")[0]
        return str(host), int(port)

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the model with arguments of its own in each process; results by rank.

        Raises:
            RollgradError: the method raised it; that of the lowest rank.
            LostProcessError: a process was lost, or they did not answer in time.
            WorkerError: the method failed in another way.
        """
        with self._turn:
            self._require_whole()
            self._stop_reading()
            calls = zip(self._workers, arguments, strict=True)
            return self._gather({rank: w.call.remote(method, *own) for rank, (w, own) in enumerate(calls)}, method)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method with the same arguments, which are sent once, in all processes; results by rank."""
        self._require_whole()  # first: without its raylet, whose death ends all of them, `put` ends this process
        shared = [self.put(argument) for argument in arguments]
        return self.each(method, [shared] * self.size)

    def put(self, argument: Any) -> Any:
        """Returns an argument for several processes, which is sent once."""
        return ray_module().put(argument)

    def begin(self, method: str, ranks: Sequence[int], *arguments: Any) -> Callable[[], list[Any]]:
        """Starts a call in some processes; returns a function that waits for the results."""
        workers = self._workers  # another thread may empty the list when it finds a process lost
        self._require_whole()
        references = {rank: workers[rank].call.remote(method, *arguments) for rank in ranks}
        return lambda: self._gather(references, method)

    def some(self, method: str, ranks: Sequence[int], *arguments: Any) -> list[Any]:
        """Calls a method in some processes, also while other threads call; returns the results."""
        return self.begin(method, ranks, *arguments)()

    def read(
        self, begin: str, *arguments: Any, ranks: Sequence[int], following: str, rest: str, others: str
    ) -> Iterator[list[Any]]:
        """Yields the results of `following` in the processes `ranks` until all are None.

        `begin` is called first, with its arguments; the other processes take part by one long call, `others`. Closing
        the iterator, or a call of all processes, ends the reading: `ranks` then call `rest`.

        Raises:
            WorkerError: another call has ended the reading, a process was lost, or they did not answer in time.
        """
        reading = object()
        with self._turn:
            self._require_whole()
            self._stop_reading()
            taking_part = [rank for rank in range(self.size) if rank not in ranks]
            self._participants = {rank: self._workers[rank].call.remote(others) for rank in taking_part}
            self._reading, self._end_reading = reading, self._end_function(rest, ranks)
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
                if all(item is None for item in items):
                    return
                yield items
        finally:
            if self._reading is reading:  # the reader has given up, but the other processes wait for the rest
                with self._turn:
                    if self._reading is reading:
                        self._stop_reading()

    def begin_profile(self) -> None:
        """Begins to record what the processes compute."""
        self._call_all("beginning a profile", lambda worker: worker.begin_profile.remote())

    def end_profile(self) -> dict[str, bytes]:
        """Returns what was recorded by the name of each process, as Chrome traces."""
        traces = self._call_all("ending a profile", lambda worker: worker.end_profile.remote())
        return {f"{self.name}-{rank}": trace for rank, trace in enumerate(traces)}

    def close(self) -> None:
        """Ends the processes; may be called again."""
        workers, self._workers = self._workers, []
        end_workers(workers)

    def _waiting(self, doing: str) -> AbstractContextManager[None]:
        processes = "process" if self.size == 1 else "processes"
        return waiting_for(f"{self.size} {processes} of {self.name} to {doing}", deadline=self.timeout)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        require_raylet()

    def _end_function(self, rest: str, ranks: Sequence[int]) -> Callable[[], object]:
        def end() -> None:
            others, self._participants = self._participants, {}
            last = {rank: self._workers[rank].call.remote(rest) for rank in ranks}
            self._gather(last | others, rest)

        return end

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading = None
            self._end_reading()

    def _call_all(self, doing: str, call: Callable[[Any], Any]) -> list[Any]:
        return self._gather({rank: call(worker) for rank, worker in enumerate(self._workers)}, doing)

    def _gather(self, references: Mapping[int, Any], doing: str) -> list[Any]:
        """Returns the results of `references`, by rank; failures of processes that take part in a reading count,
        too."""
        ray = ray_module()
        pending = {reference: rank for rank, reference in [*self._participants.items(), *references.items()]}
        wanted, results = set(references.values()), dict[Any, Any]()
        failures: dict[int, Exception] = {}
        began = time.monotonic()
        deadline, next_line = _Deadline(began + self.timeout), began + TELL_SECONDS
        while wanted or (failures and pending):
            done, _ = ray.wait(list(pending), timeout=max(0.0, min(deadline.at, next_line) - time.monotonic()))
            if not done and next_line < deadline.at:
                log.info(
                    f"{_named(sorted(pending.values()))} of {self.name} did not answer {doing!r} yet "
                    f"({next_line - began:g} s of {self.timeout:g} s)"
                )
                next_line += TELL_SECONDS
            elif not done and (deadline.is_last or len(pending) == 1):
                break
            elif not done:  # those that only wait for a silent one fail now, too, which tells who that is
                deadline.set_last(GRACE_SECONDS)
            for reference in done:
                rank = pending.pop(reference)
                wanted.discard(reference)
                try:
                    results[reference] = ray.get(reference)
                except Exception as error:  # of any kind: `_main_error` compares the errors of all
                    failures[rank] = error
                    deadline.set_last(_seconds_for_cause(error))
        if failures or wanted:
            raise self._main_error(failures, sorted(pending.values()), doing, waits=bool(wanted))
        return [results[reference] for reference in references.values()]

    def _main_error(
        self, failures: dict[int, Exception], silent: Sequence[int], doing: str, *, waits: bool
    ) -> Exception:
        """Returns the most telling error: the death of a process, else the failure of the lowest rank, but for
        exchanges that failed only because of a process that is silent, or of the network. If a process `waits` for one
        that has failed, the group is ended: what it computes next would meet what that one waits for."""
        if dead := [rank for rank, error in failures.items() if _is_death(error)]:
            if any(_is_lack_of_memory(failures[rank]) for rank in dead):
                return self._end(f"died ({NO_MEMORY})", dead, doing, LostProcessError)
            return self._end("died", dead, doing, LostProcessError)
        causes = {rank: error for rank, error in failures.items() if not _is_of_exchange(error)}
        if not causes and silent:
            return self._end(f"did not answer within {self.timeout:g} s", silent, doing, LostProcessError)
        rank, error = min((causes or failures).items())
        cause = getattr(error, "cause", None)
        failed = f"failed ({type(cause or error).__name__}: {str(cause or error)[:300]})"
        if isinstance(cause, RollgradError):
            if waits and not isinstance(cause, CheckpointError):  # parts of a state are written without the others
                self._end(failed, [rank], doing, LostProcessError)
            return cause
        return self._end(failed, [rank], doing, WorkerError if causes else LostProcessError)

    def _end(self, what: str, ranks: Sequence[int], doing: str, kind: type[WorkerError]) -> WorkerError:
        if self._broken is not None:  # this call's processes were ended because another call found one dead
            return type(self._broken)(str(self._broken))
        self._broken = kind(
            f"Of the {self.size} processes of {self.name}, {_named(ranks)} {what} while {doing!r} was under "
            f"way.{self._last_words(ranks)}{START_AGAIN}"
        )
        self._reading, self._participants = None, {}
        self.close()
        return self._broken

    def _last_words(self, ranks: Sequence[int]) -> str:
        """Returns a sentence about the files of what processes wrote, as NCCL does, which Ray shows nobody; nothing
        before they have joined."""
        files = " and ".join(LOG.format(pid=self.pids[rank]) for rank in ranks[:NAMED] if self.pids)
        where = "its machine" if len(ranks) == 1 else "their machines"
        return f" What was written there last is in {files} on {where}." if files else ""


@define
class _Deadline:
    """When a call of several processes stops to wait for them."""

    at: float
    """Time of the monotonic clock, in seconds."""
    is_last: bool = False
    """Whether the call has failed, or its time is over, and the wait is for the cause alone."""

    def set_last(self, seconds: float) -> None:
        """Waits for the cause of a failure, `seconds` from now at most; an earlier last deadline stays."""
        at = time.monotonic() + seconds
        self.at = min(self.at, at) if self.is_last else at
        self.is_last = True


def _seconds_for_cause(error: Exception) -> float:
    """Returns how many seconds after an error its cause may still show in other processes."""
    if _is_death(error):
        return 0.0
    return GRACE_SECONDS if _is_of_exchange(error) else CAUSE_SECONDS


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _is_death(error: Exception) -> bool:
    """Returns whether an error is the death of a process, not an exception of its call."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _is_of_exchange(error: Exception) -> bool:
    """Returns whether a process failed at an exchange with others: it waited in vain, or was cut off."""
    from torch.distributed import DistError

    cause = getattr(error, "cause", None) or error
    return isinstance(cause, DistError) or "gloo/transport" in str(cause)  # torch has no class for errors of gloo


def _is_lack_of_memory(error: Exception) -> bool:
    """Returns whether Ray killed a process because its machine's memory was nearly full."""
    from ray.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)
