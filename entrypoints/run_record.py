"""`run.json`: whether a run is going on, and how it ended, for people and other tools.

Invariant: the file is whole at every moment; a run that stops without a word leaves `running` with an old heartbeat.
Importable without torch.
"""

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import rollgrad
from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import RUN_FILE, TRAINING_STATE, numbered
from rollgrad.adapters.system.exits import telling_exits
from rollgrad.application.foreign import first_line
from rollgrad.entrypoints.redaction import known_secrets, redact

HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 25.0
"""Age of the last heartbeat from which on a run counts as dead: two heartbeats are missing."""
SILENT_ELSEWHERE = 90.0
"""Age from which on one on another machine does: NFS may show a file as it was up to 60 seconds ago."""
LOOK_SECONDS = 1.0
CLOCKS_APART = 86400.0
"""Seconds by which the clocks of two machines may differ, a wrong time zone included."""
PACKAGES = ("torch", "transformers", "vllm", "deepspeed", "ray")


class RunStatus(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """By a signal; the model of the last finished step is saved."""
    FAILED = "failed"
    """By an error, which is the reason."""
    DIED = "died"
    """Without a word: it was killed, or its machine stopped. Never written, but concluded from an old heartbeat."""


_open: dict[Path, "RunRecord"] = {}
"""Records of this process by their files: the newest of a directory alone is written."""

_heard: dict[Path, tuple[str, float, bool]] = {}
"""Last heartbeats of runs on other machines, by their files, each with the time since when this process knows it, and
whether it knows one before."""


class RunRecord:
    """Keeps `run.json` in `directory` up to date while its block runs. A file that cannot be written is reported once,
    and does not stop the run.

    Besides `status`, `reason`, `started`, `heartbeat`, `ended`, `process`, `host` and `versions` the file has:

    - `boot`: which start of the machine it is, and the heartbeat in seconds since then, whatever its clock says;
    - `steps`: of the whole run;
    - `continued_from`: finished steps of the run before;
    - `training_state`: step of the newest one that was seen in `states`, by default `directory`;
    - `learning`: settings that findings depend on, `steps` among them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        learning: Mapping[str, Any],
        continued_from: int | None = None,
        reason: str | None = None,
        states: Path | None = None,
        training_state: int | None = None,
    ) -> None:
        self._states = directory if states is None else states
        self._path = (directory / RUN_FILE).absolute()
        self._facts: dict[str, Any] = {
            "status": RunStatus.RUNNING,
            "reason": None if reason is None else redact(reason, known_secrets()),
            "started": _now(),
            "heartbeat": None,
            "boot": None,
            "ended": None,
            "steps": learning["steps"],
            "continued_from": continued_from,
            "training_state": training_state,
            "learning": dict(learning),
            "process": os.getpid(),
            "host": socket.gethostname(),
            "versions": versions(PACKAGES),
        }
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._exits = ExitStack()
        self._warned = False

    def __enter__(self) -> Self:
        if (starting := _open.get(self._path)) is not None:  # the run has started again, and now goes on
            starting._silence()
        _open[self._path] = self
        self._write()
        self._beating.start()
        self._exits.enter_context(telling_exits(self._exited))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.interrupted("SIGINT")
        elif error is not None:
            self._failed(first_line(error))
        elif self._facts["status"] is RunStatus.RUNNING:
            self._facts["status"] = RunStatus.FINISHED
        self._exits.close()
        self._end()

    def _failed(self, reason: str) -> None:
        self._facts |= {"status": RunStatus.FAILED, "reason": redact(reason, known_secrets())}

    def _exited(self, reason: str) -> None:
        self._failed(reason)
        self._end()

    def _end(self) -> None:
        self._silence()
        if _open.get(self._path) is self:
            del _open[self._path]
            self._facts["ended"] = _now()
            self._write()

    def _silence(self) -> None:
        self._over.set()
        self._beating.join()

    def interrupted(self, signal: str) -> None:
        """Records that a signal ended the run."""
        self._facts |= {"status": RunStatus.INTERRUPTED, "reason": signal}

    def finished(self, reason: str) -> None:
        """Records why the run ended before all its steps, as it was set to."""
        self._facts |= {"status": RunStatus.FINISHED, "reason": reason}

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        self._facts |= {"heartbeat": _now(), "boot": _boot()}
        with suppress(OSError):  # the disk may be gone; what was written is known
            for step, _ in numbered(self._states, TRAINING_STATE)[:1]:
                self._facts["training_state"] = step
        try:
            keep_locked(self._path.parent)
            replace_file(self._path, (json.dumps(self._facts, indent=2) + "\n").encode(errors="replace"))
        except OSError as error:  # a full disk, on which the next one may find room, or another run is there
            if not self._warned:
                import structlog  # not above: help loads this module, and no logging

                log = structlog.get_logger(__name__)
                log.warning("the state of the run cannot be written", path=str(self._path), reason=str(error))
            self._warned = True


@contextmanager
def starting_again(directory: Path, reason: str) -> Iterator[None]:
    """Shows a run as running, for a `reason`, while its block starts it again, until it has a record of its own."""
    facts = read_run(directory)
    if facts is None or not isinstance(facts.get("learning"), dict) or "steps" not in facts["learning"]:
        yield  # it was lost before it had begun
        return
    kept = {name: facts.get(name) for name in ("continued_from", "training_state")}
    with RunRecord(directory, learning=facts["learning"], reason=reason, **kept):
        yield


def read_run(directory: Path) -> Mapping[str, Any] | None:
    """Returns what `run.json` says, with `died` as the status of a run whose heartbeat stopped; None if there is no
    readable one, as in a run of an earlier version. `uncertain`: whether a run on another machine, whose clock shows
    another time, has to be read again until it is known whether it has died; `heartbeat_age`: seconds since the last
    one."""
    path = directory / RUN_FILE
    try:
        facts = json.loads(path.read_bytes())
        facts["status"] = RunStatus(facts["status"])
        age = _heartbeat_age(facts)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    facts |= {"uncertain": False, "heartbeat_age": age}
    if facts["status"] is not RunStatus.RUNNING:
        return dict(facts)
    if _same_machine(facts):
        silent, died = age, age > SILENT_SECONDS
    else:
        silent, died, facts["uncertain"] = _heard_elsewhere(path.absolute(), facts["heartbeat"], age)
    facts["heartbeat_age"] = silent
    if died:
        facts |= {"status": RunStatus.DIED, "reason": f"no heartbeat for {silent:.0f} seconds"}
    return dict(facts)


def _same_machine(facts: Mapping[str, Any]) -> bool:
    then, now = facts.get("boot"), _boot()
    return bool(then and now and then["id"] == now["id"]) or facts.get("host") == socket.gethostname()


def _heard_elsewhere(path: Path, heartbeat: str, age: float) -> tuple[float, bool, bool]:
    """Returns for how long a run on another machine has been silent, whether it has died, and whether that is
    uncertain. Its clock may be ahead or behind, so what counts is how long this process has known the last
    heartbeat."""
    now = time.monotonic()
    before, since, beats = _heard.setdefault(path, (heartbeat, now, False))
    if before != heartbeat:
        since, beats = now, True
        _heard[path] = (heartbeat, since, beats)
    silent = now - since
    died = silent > SILENT_ELSEWHERE or (not beats and age > CLOCKS_APART)
    return silent if beats else max(age, silent), died, not (died or beats or abs(age) <= SILENT_ELSEWHERE)


def await_heartbeat(directory: Path, tell: Callable[[str], object]) -> None:
    """Waits until it is known whether a run on another machine has died, and tells that it waits."""
    facts = read_run(directory)
    if facts is not None and facts["uncertain"]:
        host, seconds = facts.get("host"), SILENT_ELSEWHERE
        tell(f"{host} has another time, or its run has died: waiting for a heartbeat, at most {seconds:.0f} s")
    while facts is not None and facts["uncertain"]:
        time.sleep(LOOK_SECONDS)
        facts = read_run(directory)


def _heartbeat_age(facts: Mapping[str, Any]) -> float:
    """Returns the seconds since the heartbeat of a run, by the clocks of both machines.

    Raises:
        ValueError, TypeError, KeyError: there is none, or not as a run writes it.
    """
    age = (datetime.now(UTC) - datetime.fromisoformat(facts["heartbeat"])).total_seconds()
    then, now = facts.get("boot"), _boot()
    if then and now and then["id"] == now["id"]:  # the clock of this machine may have been set meanwhile
        return float(now["seconds"]) - float(then["seconds"])
    return age


def _boot() -> dict[str, Any] | None:
    """Returns which start of this machine it was, and the seconds since; None where the system does not say."""
    try:
        id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return {"id": id, "seconds": round(time.clock_gettime(time.CLOCK_BOOTTIME), 1)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of rollgrad, Python, and of these packages, where they are installed."""
    installed = {package: found for package in packages if (found := _version(package)) is not None}
    return {"rollgrad": rollgrad.__version__, "python": platform.python_version(), **installed}


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
