"""Runs a model's code in an isolated process, and collects its output in bounded memory.

Invariants: however a run ends (by itself, by its deadline, by cancellation, with this process), all of its processes
end; the event loop is never blocked. Does not own: the isolation of the process (code_child, a script at the other end
of the pipes).
"""

import asyncio
import codecs
import contextlib
import functools
import marshal
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog
from attrs import frozen

from rollgrad.adapters.sandbox.kept_files import KEPT

CHUNK_BYTES = 1 << 16
FLOOD_BYTES = 8 << 20
"""Bytes of output after which a run is stopped, because reading it takes the event loop's time."""
CLOSE_SECONDS = 90.0
"""Longest wait for a run that was told to end; then it is killed. It is longer than its guard's `SWEEP_SECONDS`."""
PROBE_SECONDS = 20.0
PROBE_MB = 512
CHILD = str(Path(__file__).with_name("code_child.py"))
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # A file's compiled form is told from that of its text of a call before by size and second alone.
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "1",  # one arena for each thread would use up the address space, which is limited
}

_log = structlog.get_logger()


@frozen(kw_only=True)
class Outcome:
    """Output of a run, and how it ended."""

    output: str
    code: int | None
    """Exit status (128 plus the signal if it was killed); None if it did not end by itself."""
    stopped: str = ""
    """Why it did not end by itself: "timeout", "flood", "memory" (its processes together used too much) or "failed"
    (the sandbox did not work; the log says why)."""
    files: bytes | None = None
    """Files that it left, if they were asked for; None, too, if they are too many or too large (`kept_files`)."""


class Output:
    """Keeps the beginning and the end of a text, `limit` characters together, and counts those between."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._half = limit // 2
        self._head = ""
        self._tail = ""
        self._cut = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Adds the next bytes of UTF-8."""
        text = self._decoder.decode(data, final)
        room = self._limit - self._half - len(self._head)
        self._head += text[:room]
        self._tail += text[room:]
        over = len(self._tail) - self._half
        if over > 0:
            self._tail = self._tail[over:]
            self._cut += over

    def text(self) -> str:
        """Returns the kept text, with a line that says how much is missing."""
        middle = f"\n[... {self._cut} characters left out ...]\n" if self._cut else ""
        return self._head + middle + self._tail


async def run(
    code: str,
    *,
    seconds: float,
    memory_mb: int,
    output_chars: int,
    namespaces: bool,
    files: bytes = b"",
    keep: bool = False,
) -> Outcome:
    """Runs Python code.

    Args:
        code: a module's source.
        seconds: time limit, the start of the process included.
        memory_mb: megabytes of address space of each of its processes, and of memory of them together.
        output_chars: characters of output that are kept.
        namespaces: whether to use Linux namespaces; they must work (`namespaces_problem`).
        files: those in its working directory when it begins, an `Outcome.files`.
        keep: whether its files are asked for.
    """
    output = Output(output_chars)
    stopped, received = "", 0
    process = await asyncio.create_subprocess_exec(
        *command(CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds) as deadline:
            process.stdin.write(_request(code, seconds, memory_mb, namespaces, files, keep))
            while data := await process.stdout.read(CHUNK_BYTES):
                output.feed(data)
                received += len(data)
                if received > FLOOD_BYTES:
                    stopped = "flood"
                    break
    except TimeoutError:
        if not deadline.expired():
            raise
        stopped = "timeout"
    finally:
        # Shielded, so that the processes end even if the call is cancelled.
        control = await asyncio.shield(asyncio.create_task(_end(process)))
    output.feed(b"", final=True)
    return _outcome(output.text(), control, stopped, process.returncode)


def _outcome(text: str, control: bytes, stopped: str, status: int | None) -> Outcome:
    """Returns the outcome of a run that has ended.

    Args:
        text: the output that is kept.
        control: the guard's report of how the run ended, with its files if they were asked for.
        stopped: why it was stopped here; empty if it was not.
        status: exit status of the guard.
    """
    ended, _, rest = control.partition(b"\n")
    files = rest[len(KEPT) :] if rest.startswith(KEPT) else None
    if ended == b"memory":
        stopped = stopped or "memory"
    if stopped:
        return Outcome(output=text, code=None, stopped=stopped, files=files)
    try:
        return Outcome(output=text, code=int(ended), files=files)
    except ValueError:
        _log.warning("sandbox_failed", status=status, details=control.decode(errors="replace")[-2000:])
        return Outcome(output=text, code=None, stopped="failed")


@functools.cache
def namespaces_problem() -> str | None:
    """Returns why this user cannot isolate code with namespaces on this machine; None if that works, which is tried
    once."""
    if sys.platform != "linux":
        return "this is not Linux"
    request = _request("import hashlib; print(40 + 2)", PROBE_SECONDS, PROBE_MB, namespaces=True)
    process = subprocess.Popen(
        command(CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(request)
        process.stdin.flush()
        output = process.stdout.read()
        details = process.stderr.read()
    if output.strip() == b"42":
        return None
    reason = (details or output).decode(errors="replace").strip().splitlines()
    return reason[-1] if reason else "no answer"


def nobody_reads_python() -> bool:
    """Returns whether user 65534, which root's runs become, may read this interpreter's standard library."""
    library = Path(os.__file__).resolve().parent
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (library, *library.parents))


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """Ends a run; returns its guard's answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def drain(stream: asyncio.StreamReader) -> None:
        while await stream.read(CHUNK_BYTES):
            pass

    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            _, control, _ = await asyncio.gather(drain(process.stdout), process.stderr.read(), process.wait())
            return bytes(control)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return b"the guard did not end in time"


def command(script: str) -> list[str]:
    """Returns the command that runs a script of this folder, with the standard library alone."""
    # The real interpreter, not a virtual environment's link: inside the sandbox there is no virtual environment.
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", script]


def _request(
    code: str, seconds: float, memory_mb: int, namespaces: bool, files: bytes = b"", keep: bool = False
) -> bytes:
    request = {
        "code": code,
        "cpu_seconds": math.ceil(seconds) + 1,
        "memory_mb": memory_mb,
        "namespaces": namespaces,
        "files": files,
        "keep": keep,
        "directory": tempfile.gettempdir(),
        **system_files(),
    }
    data = marshal.dumps(request)
    return len(data).to_bytes(8, "little") + data


@functools.cache
def system_files() -> dict[str, list[str]]:
    """Returns the files that code can read with namespaces: the interpreter and the system's programs, but no
    package."""
    prefixes = dict.fromkeys(("/usr", os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)))
    folders = [f"{prefix}/{part}" for prefix in prefixes for part in ("bin", "lib", "lib64")]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "visible": ["/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", *folders],
        "hidden": [
            f"{prefix}/lib/{python}/{packages}"
            for prefix in prefixes
            for python in ("python3", version)
            for packages in ("site-packages", "dist-packages")
        ],
    }
