"""The tool that runs Python code of a model. Does not own: the isolation of the code (rollgrad.adapters.sandbox)."""

import asyncio
import copy
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import structlog

from rollgrad.adapters.sandbox import code_run, kept_files, syscalls
from rollgrad.adapters.system.slots import Slots
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.adapters.tools.text_argument import read_text, text_schema
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.environment import KeepsEpisodes, Tool

ALLOW_NAMESPACES = (
    "allow them (Docker: --cap-add SYS_ADMIN --security-opt apparmor=unconfined, or for a user who is not root "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, and the same in a pod's securityContext; "
    "Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; elsewhere: sysctl user.max_user_namespaces=10000)"
)
"""Advice in errors."""

NOT_KEPT = (
    f"The files of this call are not kept: there may be {kept_files.MOST} files, of {kept_files.KEPT_MB} MB together. "
    "Those of earlier calls are still there."
)
"""Told to the model."""
IN_MEMORY_BYTES = 1 << 18
"""Largest size of an episode's files that are not written to disk between two calls."""

_log = structlog.get_logger()


class PythonTool(Tool, KeepsEpisodes):
    """`python`: runs code in a fresh process each call and returns what it prints, and the value of a last expression.

    The code has the standard library of this interpreter, a working directory, and nothing of the environment
    variables. Of a tool `for_episode`, the files in that directory are there in its next call, which waits for the one
    before; nothing else is kept, and of any other tool nothing at all. Linux only. Contained in any case:

    - time: all of its processes, daemonised ones too, are killed at the deadline, on cancellation, at its end, and when
      this process dies;
    - memory (of each process, and of all together, looked at 20 times a second; outside of processes only what pipes
      and sockets hold, of which sockets are counted with namespaces alone), processor time, files (64 MB each, 128
      open), processes and threads (64 together), output;
    - privileges: run as root, the code becomes nobody (user 65534); none can be gained. System calls that make
      namespaces and mounts, read other processes, or serve attacks on the kernel above all are refused (seccomp).

    With namespaces (Linux 5.12; as root, or where unprivileged user namespaces are allowed), it sees no network, no
    other process, and no file but the system's programs and libraries and the interpreter's standard library,
    read-only; all it writes is at most 64 MB of memory. It holds what a model tries; against an attack on the kernel
    itself only a virtual machine helps.

    Without them it has the network, sees other processes, and reads, writes and deletes what the user nobody (as root)
    or this user (otherwise) may. For this user, that includes credentials in files and in the environment of the user's
    other processes; that of this process is closed to it. It could also kill those, the guard that watches its deadline
    among them. No limit holds for all files together. Run such code in a container of its own.

    Args:
        isolation: whether the code is shut in with namespaces.
        flag: what sets it, for errors.
        seconds: until a call is stopped.
        memory_mb: megabytes of address space of a process, and of memory of all processes together; the bare
            interpreter takes about 30.
        output_chars: characters of output that the model is shown, from its beginning and its end.
        processes: calls that run at once; default is one a processor. Others wait, their time does not run yet.

    Raises:
        ConfigurationError: namespaces do not work and are asked for, a number is out of range, the machine has no
            Linux whose system calls are known, or root's code could not read Python.
    """

    name = "python"
    parameters = text_schema("code", "The code to run.")

    def __init__(
        self,
        *,
        isolation: PythonIsolation = PythonIsolation.NAMESPACES,
        flag: str = "--agent.python_isolation",
        seconds: float = 10.0,
        memory_mb: int = 512,
        output_chars: int = 4000,
        processes: int | None = None,
    ) -> None:
        processes = (os.cpu_count() or 1) if processes is None else processes
        for name, value, least in (
            ("seconds", seconds, 0.1),
            ("memory_mb", memory_mb, 64),
            ("output_chars", output_chars, 100),
            ("processes", processes, 1),
        ):
            if not value >= least:
                raise ConfigurationError(f"The python tool has {name}={value:g}, but it needs {least:g} or more.")
        if not hasattr(os, "pidfd_open") or not syscalls.known():
            raise ConfigurationError(
                "The python tool needs Linux on x86_64 or aarch64, where it can contain its code: leave it out."
            )
        self._workspace: _Workspace | None = None
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._output_chars = output_chars
        self._slots = Slots(processes)
        self._namespaces = isolation is PythonIsolation.NAMESPACES
        problem = code_run.namespaces_problem() if self._namespaces else None
        if problem is not None:
            raise ConfigurationError(
                f"The python tool shuts a model's code in with Linux namespaces, which do not work here ({problem}): "
                f"{ALLOW_NAMESPACES}; or let the code do all that you may do, with {flag} none."
            )
        if self._namespaces:
            return
        if os.getuid() == 0 and not code_run.nobody_reads_python():
            raise ConfigurationError(
                f"The python tool runs as root without namespaces, so its code becomes user 65534, who may not read "
                f"{sys.base_prefix}: run as another user, or with a Python that all users may read."
            )
        from rollgrad.adapters.sandbox import walls  # imported here, because it needs Linux

        walls.close_memory()
        _log.warning("python_tool_without_namespaces", flag=f"{flag} none")

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs `code`. An exception, a passed deadline, too much memory or output are results with `is_error`.

        Raises:
            EngineError: the sandbox fails, or there is no room for the files that it keeps.
        """
        code = read_text(self.name, "code", arguments)
        if isinstance(code, ToolResult):
            return code
        if self._workspace is None:
            return self._result(await self._run(code, b"", keep=False), kept=True)
        async with self._workspace.turns.here():
            outcome = await self._run(code, await self._workspace.read(), keep=True)
            if outcome.files is not None:
                await self._workspace.write(outcome.files)
        return self._result(outcome, kept=outcome.files is not None or outcome.stopped == "failed")

    async def _run(self, code: str, files: bytes, *, keep: bool) -> code_run.Outcome:
        async with self._slots.here():
            outcome = await code_run.run(
                code,
                seconds=self._seconds,
                memory_mb=self._memory_mb,
                output_chars=self._output_chars,
                namespaces=self._namespaces,
                files=files,
                keep=keep,
            )
        if outcome.stopped == "failed" and self._namespaces:
            # Code that is shut in has no part in it, and from a result the model would learn not to call the tool. Code
            # that is not shut in may have killed its guard.
            raise EngineError("The sandbox of the python tool failed: the log says why (sandbox_failed).")
        return outcome

    def _result(self, outcome: code_run.Outcome, *, kept: bool) -> ToolResult:
        output = outcome.output.rstrip("\n")
        if outcome.code == 0 and kept:
            return ToolResult(content=output or "(no output)")
        parts = [output, "" if outcome.code == 0 else self._describe_end(outcome), "" if kept else NOT_KEPT]
        return ToolResult(content="\n".join(part for part in parts if part), is_error=True)

    @property
    def description(self) -> str:
        """Says what the code has, and what is kept from one call to the next."""
        kept = "keeps nothing" if self._workspace is None else "keeps the files of its working directory, no variables,"
        return (
            "Run Python code in a fresh process and see what it prints; the value of a last expression is printed too. "
            f"It has the standard library only, no network, and {kept} from one call to the next."
        )

    def for_episode(self) -> "PythonTool":
        """Implements `KeepsEpisodes.for_episode`: the calls of all episodes share the slots of this tool."""
        mine = copy.copy(self)
        mine._workspace = _Workspace()
        return mine

    async def close(self) -> None:
        """Removes the files that it keeps."""
        if self._workspace is not None:
            self._workspace.close()

    def _describe_end(self, outcome: code_run.Outcome) -> str:
        """Returns how a failed run ended; empty if a traceback says so already."""
        if outcome.stopped == "timeout":
            return f"The code was stopped: it may run for {self._seconds:g} s."
        if outcome.stopped == "flood":
            return f"The code was stopped: it printed over {code_run.FLOOD_BYTES >> 20} MB."
        if outcome.stopped == "memory":
            return f"The code was stopped: its processes may use {self._memory_mb} MB of memory together."
        if outcome.code is None:
            return "The tool 'python' failed."
        if outcome.code > 128:
            try:
                name = signal.Signals(outcome.code - 128).name
            except ValueError:
                return f"The code ended with status {outcome.code}."
            return f"The code was killed by {name}."
        return "" if outcome.code == 1 and outcome.output else f"The code ended with status {outcome.code}."


class _Workspace:
    """Files of an episode between two calls, and the right to change them, which one call has at a time.

    They are nowhere by name: the operating system takes them back however this process ends.
    """

    def __init__(self) -> None:
        self.turns = Slots(1)
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  (`close` closes it)

    async def read(self) -> bytes:
        """Returns them, as `code_run.run` takes them."""

        def read() -> bytes:
            self._file.seek(0)
            return self._file.read()

        return await asyncio.to_thread(read)

    async def write(self, files: bytes) -> None:
        """Puts others in their place.

        Raises:
            EngineError: there is no room for them.
        """

        def write() -> None:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(files)
            self._file.flush()

        try:
            await asyncio.to_thread(write)
        except OSError as error:  # the model has no part in it, and counted on the files
            raise EngineError(
                f"The python tool keeps an episode's files in {tempfile.gettempdir()}, which failed ({error}): "
                f"{remedy(error)}, or set TMPDIR to a folder that has some."
            ) from error

    def close(self) -> None:
        """Removes them."""
        self._file.close()
