"""`JudgePool` judges replies in isolated processes that can be killed.

Invariants: a judgement that exceeds its deadline or memory, or runs code from the reply, can spoil no other judgement.
Its process judges no other reply (judge_child), and its answer is a number and a text of bounded length, never an
object. Every wait has a deadline. Does not own: the judgement itself.
"""

import asyncio
import contextlib
import functools
import importlib.util
import marshal
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import structlog
from attrs import frozen

from rollgrad.adapters.sandbox import code_run, judge_child, syscalls
from rollgrad.adapters.system.process_group import kill_group
from rollgrad.application.settings.sections.reward import JudgeIsolation
from rollgrad.domain.errors import ConfigurationError, RewardError

MAX_WORKERS = 8
"""Largest number of processes. Judgements take milliseconds, so more would only use memory."""
MEMORY_MB = 1024
"""Megabytes that a judgement may use beyond the memory of the judge's libraries."""
START_SECONDS = 300.0
"""Longest wait for a process to import its judge, on a busy machine."""
GRACE_SECONDS = 60.0
"""Longest wait for an answer after a judgement's deadline, which the process itself enforces; then it is killed."""
CLOSE_SECONDS = 5.0
"""Longest wait for the end of killed processes."""


@frozen(kw_only=True)
class Verdict:
    """Verdict on a reply: its `value`, or the reason for none: the deadline passed (`timed_out`) or the judge
    `failed`."""

    value: float = 0.0
    timed_out: bool = False
    failed: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        """Shares of judgements without a value, for the log."""
        return {"judge_timed_out": float(self.timed_out), "judge_failed": float(self.failed)}


_log = structlog.get_logger()


class JudgePool:
    """Processes that judge with the functions of a module, from 0 to 1, each call within `timeout` seconds.

    Processes run the module's source, which imports the packages in `PACKAGES` and nothing of rollgrad. Its `warm_up()`
    runs first in each process, before it is isolated, and `prepare(*common)` once before the judgements that get
    `common`. Modules whose names begin with a prefix in `EVALUATES` get the `eval` of `expressions`.

    Args:
        judge: the module.
        timeout: seconds of one judgement.
        isolation: whether processes are isolated.

    Raises:
        ConfigurationError: this machine cannot isolate processes.
    """

    def __init__(
        self, judge: ModuleType, *, timeout: float, isolation: JudgeIsolation = JudgeIsolation.SANDBOX
    ) -> None:
        request = _start_request(judge, timeout, _walls() if isolation is JudgeIsolation.SANDBOX else "")
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        count = max(2, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))
        self._workers = [_Worker(self._jobs, request, timeout) for _ in range(count)]

    async def judge(self, function: Callable[..., float], *arguments: Any, common: tuple[Any, ...] = ()) -> Verdict:
        """Returns the verdict of `function(*common, *arguments)` in an own process; no value if it raises or is killed.

        Raises:
            RewardError: the pool is closed, or its processes cannot start.
        """
        return await asyncio.wrap_future(self.submit(function, *arguments, common=common))

    def submit(self, function: Callable[..., float], *arguments: Any, common: tuple[Any, ...] = ()) -> Future[Verdict]:
        """Returns the future verdict, for callers without an event loop; raises as `judge` does."""
        name = function.__name__
        job = _Job(name=name, request=pickle.dumps((name, common, arguments)), verdict=Future())
        self._jobs.put(job)
        if self._workers[0].closed:
            self._refuse_waiting()
        return job.verdict

    def close(self) -> None:
        """Kills the processes; idempotent."""
        for worker in self._workers:
            worker.close()
            self._jobs.put(None)  # wakes a worker that waits for a job
        self._refuse_waiting()
        for worker in self._workers:
            worker.join()

    def _refuse_waiting(self) -> None:
        """Fails the jobs that no worker will take any more."""
        waiting = []
        while not self._jobs.empty():
            waiting.append(self._jobs.get())
        for job in waiting:
            if job is None:
                self._jobs.put(None)
            else:
                job.fail(RewardError("The reward's worker processes are not running: they were closed."))


@frozen(kw_only=True)
class _Job:
    name: str
    request: bytes
    verdict: Future[Verdict]

    def fail(self, error: BaseException) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(error)


class _Worker:
    """One judging process, and the thread that communicates with it."""

    def __init__(self, jobs: "SimpleQueue[_Job | None]", request: bytes, timeout: float) -> None:
        self.closed = False
        self._jobs = jobs
        self._request = request
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kills the process; the thread then fails its job and ends."""
        self.closed = True
        self._kill()

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        # Started at once, so that its libraries are imported while models load. After a failure the first job starts
        # it again, and reports a second failure.
        with contextlib.suppress(RewardError):
            self._start()
        while not self.closed:
            job = self._jobs.get()
            if job is None:
                return
            if not job.verdict.set_running_or_notify_cancel():
                continue
            try:
                job.verdict.set_result(self._judge(job))
            except BaseException as error:  # whatever it is, somebody waits for it
                job.fail(error)

    def _judge(self, job: _Job) -> Verdict:
        if self._connection is None:
            self._start()
        try:
            status, value, text = self._ask(job.request, self._timeout + GRACE_SECONDS)
        except (OSError, EOFError) as error:
            self._kill()
            if self.closed:
                raise RewardError("The reward's worker processes are not running: they were closed.") from error
            status, value, text = judge_child.FAILED, 0.0, f"its worker process ended: {error!r}"
        if status == judge_child.VALUE and 0.0 <= value <= 1.0:
            return Verdict(value=value)
        if status == judge_child.TIMED_OUT:
            return Verdict(timed_out=True)
        _log.warning("judge_failed", judge=job.name, error=text or f"{value} is not from 0 to 1")
        return Verdict(failed=True)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                code_run.command(judge_child.__file__),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**code_run.ENVIRONMENT, **ONE_THREAD},
                cwd="/",
                start_new_session=True,
            )
        with self._lock:
            self._process, self._connection = process, ours
        if self.closed:  # meanwhile
            self._kill()
        try:
            status, _, text = self._ask(self._request, START_SECONDS)
        except (OSError, EOFError) as error:
            status, text = judge_child.FAILED, f"it ended: {error!r}"
        if status != judge_child.READY:
            self._kill()
            if self.closed:
                text = "they were closed"
            raise RewardError(f"The reward's worker processes are not running: {text}.")

    def _ask(self, request: bytes, seconds: float) -> tuple[bytes, float, str]:
        """Sends a request; returns status, number and text of the answer."""
        connection = self._connection
        if connection is None:
            raise EOFError("no process")
        connection.settimeout(seconds)
        connection.sendall(len(request).to_bytes(8, "little") + request)
        deadline = time.monotonic() + seconds
        status, value, length = judge_child.ANSWER.unpack(_receive(connection, judge_child.ANSWER.size, deadline))
        return status, value, _receive(connection, length, deadline).decode(errors="replace")

    def _kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
        if connection is not None:
            connection.close()


ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Settings for one thread: a judgement needs no more, and each thread's buffers count against its address space."""


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data


@functools.cache
def _walls() -> str:
    """Returns the kind of isolation that this machine has for judges.

    Raises:
        ConfigurationError: it has none.
    """
    problem = code_run.namespaces_problem()
    if problem is None:
        return "namespaces"
    if syscalls.known() and sys.platform == "linux":
        from rollgrad.adapters.sandbox import walls  # which needs what Linux alone has

        if walls.landlock_version() > 0:
            return "landlock"
    raise ConfigurationError(
        "Judges of replies are shut in, for what parses a reply may run it, and this machine has no way to: no Linux "
        f"namespaces ({problem}) and no Landlock (Linux 5.13 or later on x86_64 or aarch64, which containers need no "
        "setting for). Use another kernel, or let replies do what you may do, with --reward.isolation none."
    )


def _start_request(judge: ModuleType, timeout: float, walls: str) -> bytes:
    assert judge.__file__ is not None
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    found = [importlib.util.find_spec(package) for package in judge.PACKAGES]
    # Folders of packages, which may be installed outside of site-packages.
    paths += [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    paths = list(dict.fromkeys(paths))
    request = {
        "source": Path(judge.__file__).read_text(encoding="utf-8"),
        "file": judge.__file__,
        "paths": paths,
        "walls": walls,
        "visible": [*code_run.system_files()["visible"], *dict.fromkeys([*map(os.path.realpath, paths), *paths])],
        "hidden": [],
        "seconds": timeout,
        "memory_mb": MEMORY_MB,
    }
    return marshal.dumps(request)
