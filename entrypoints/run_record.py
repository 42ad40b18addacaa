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
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

import rollgrad
from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import RUN_FILE
from rollgrad.adapters.system.exits import telling_exits
from rollgrad.application.foreign import first_line
from rollgrad.entrypoints.redaction import known_secrets, redact

log = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 25.0
"""Age of the last heartbeat from which on a run counts as dead: two heartbeats are missing."""
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


class RunRecord:
    """Keeps `run.json` in `directory` up to date while its block runs: `status`, `reason`, `started`, `heartbeat`,
    `boot` (which start of the machine it is, and the heartbeat in seconds since then, whatever its clock says),
    `ended`, `steps` (of the whole run), `continued_from` (finished steps of the run before), `learning` (settings that
    findings depend on, `steps` among them), `process`, `host`, `versions`. A file that cannot be written is reported
    once, and does not stop the run."""

    def __init__(self, directory: Path, *, learning: Mapping[str, Any], continued_from: int | None = None) -> None:
        self._path = directory / RUN_FILE
        self._facts: dict[str, Any] = {
            "status": RunStatus.RUNNING,
            "reason": None,
            "started": _now(),
            "heartbeat": None,
            "boot": None,
            "ended": None,
            "steps": learning["steps"],
            "continued_from": continued_from,
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
        self._facts["ended"] = _now()
        self._over.set()
        self._beating.join()
        self._write()

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
        try:
            keep_locked(self._path.parent)
            replace_file(self._path, (json.dumps(self._facts, indent=2) + "\n").encode(errors="replace"))
        except OSError as error:  # a full disk, on which the next one may find room, or another run is there
            if not self._warned:
                log.warning("the state of the run cannot be written", path=str(self._path), reason=str(error))
            self._warned = True


def read_run(directory: Path) -> Mapping[str, Any] | None:
    """Returns what `run.json` says, with `died` as the status of a run whose heartbeat stopped; None if there is no
    readable one, as in a run of an earlier version."""
    try:
        facts = json.loads((directory / RUN_FILE).read_bytes())
        facts["status"] = RunStatus(facts["status"])
        age = heartbeat_age(facts)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if facts["status"] is RunStatus.RUNNING and age > SILENT_SECONDS:
        facts |= {"status": RunStatus.DIED, "reason": f"no heartbeat for {age:.0f} seconds"}
    return dict(facts)


def heartbeat_age(facts: Mapping[str, Any]) -> float:
    """Returns the seconds since the heartbeat of a run.

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
