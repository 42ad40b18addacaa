"""The tool that runs Python code of a model. Does not own: the isolation of the code (rollgrad.adapters.sandbox)."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import structlog

from rollgrad.adapters.sandbox import code_run, syscalls
from rollgrad.adapters.system.slots import Slots
from rollgrad.adapters.tools.text_argument import read_text, text_schema
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import Tool

ALLOW_NAMESPACES = (
    "allow them (Docker: --cap-add SYS_ADMIN --security-opt apparmor=unconfined, or for a user who is not root "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, and the same in a pod's securityContext; "
    "Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; elsewhere: sysctl user.max_user_namespaces=10000)"
)
"""Advice in errors."""

_log = structlog.get_logger()


class PythonTool(Tool):
    """`python`: runs code in a fresh process each call and returns what it prints, and the value of a last expression.

    The code has the standard library of this interpreter, an empty working directory that is gone afterwards, and
    nothing of the environment variables. Linux only. Contained in any case:

    - time: all of its processes, daemonised ones too, are killed at the deadline, on cancellation, at its end, and when
      this process dies;
    - memory (of each process; of all together, looked at 20 times a second; none that is outside of processes),
      processor time, files (64 MB each, 128 open), processes and threads (64 together), output;
    - privileges: run as root, the code becomes nobody (user 65534); none can be gained. System calls that make
      namespaces and mounts, read other processes, or serve attacks on the kernel above all are refused (seccomp).

    With namespaces (Linux 5.12; as root, or where unprivileged user namespaces are allowed), it sees no network, no
    other process, and no file but the system's programs and libraries and the interpreter's standard library,
    read-only; all it writes is at most 64 MB of memory. It holds what a model tries; against an attack on the kernel
    itself only a virtual machine helps.

    Without them it has the network, sees other processes, and reads, writes and deletes what nobody (as root) or this
    user (otherwise) may: for the latter, credentials in files and in the environment of this user's processes, but for
    this one's, which is closed to them. It could also kill those, the guard that watches its deadline among them. No
    limit holds for all files together. Run such code in a container of its own.

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
    description = (
        "Run Python code in a fresh process and see what it prints; the value of a last expression is printed too. "
        "It has the standard library only, no network, and keeps nothing from one call to the next."
    )
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
        """Runs `code`. An exception, a passed deadline, too much memory or output are results with `is_error`."""
        code = read_text(self.name, "code", arguments)
        if isinstance(code, ToolResult):
            return code
        async with self._slots.here():
            outcome = await code_run.run(
                code,
                seconds=self._seconds,
                memory_mb=self._memory_mb,
                output_chars=self._output_chars,
                namespaces=self._namespaces,
            )
        output = outcome.output.rstrip("\n")
        if outcome.code == 0:
            return ToolResult(content=output or "(no output)")
        parts = [output, self._describe_end(outcome)]
        return ToolResult(content="\n".join(part for part in parts if part), is_error=True)

    async def close(self) -> None:
        """Does nothing, because calls leave nothing behind."""

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
