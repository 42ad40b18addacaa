"""The tool that runs Python code a model writes. Does not own: how the code is shut in (sandbox, sandbox_child)."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.system.slots import Slots
from rollgrad.adapters.tools import sandbox
from rollgrad.adapters.tools.text_argument import read_text, text_schema
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.messages import ToolResult
from rollgrad.domain.ports.environment import Tool


class PythonTool(Tool):
    """`python`: runs code in a fresh process each call and returns what it prints, and the value of a last expression.

    The code has the standard library of this interpreter, an empty working directory that is gone afterwards, and
    nothing of the environment variables. Linux only. Contained in any case:

    - time: all of its processes, daemonised ones too, are killed at the deadline, on cancellation, at its end, and when
      this process dies;
    - memory (each process), processor time, files (64 MB each, 128 open), processes and threads (64 together), output;
    - privileges: run as root, the code becomes nobody (user 65534); none can be gained.

    With namespaces, which the constructor tries (Linux 5.12; as root, or where unprivileged user namespaces are
    allowed), it sees no network, no other process, and no file but the system's programs and libraries and the
    interpreter's standard library, read-only; all it writes is at most 64 MB of memory. Processes together may use 64
    times `memory_mb`.

    Without them (a warning `python_tool_without_namespaces` is logged) it has the network, sees other processes, and
    reads what nobody (as root) or this user (otherwise) may read: for the latter, credentials in files and in the
    environment of this user's processes. It could also kill those, the guard that watches its deadline among them. No
    limit holds for all files together. Run such code in a container of its own.

    Args:
        seconds: until a call is stopped.
        memory_mb: megabytes of address space; the bare interpreter takes about 30.
        output_chars: characters of output that the model is shown, from its beginning and its end.
        processes: calls that run at once; default is one a processor. Others wait, their time does not run yet.

    Raises:
        ConfigurationError: a number is out of range, the system is not Linux, or root's code could not read Python.
    """

    name = "python"
    description = (
        "Run Python code in a fresh process and see what it prints; the value of a last expression is printed too. "
        "It has the standard library only, no network, and keeps nothing from one call to the next."
    )
    parameters = text_schema("code", "The code to run.")

    def __init__(
        self, *, seconds: float = 10.0, memory_mb: int = 512, output_chars: int = 4000, processes: int | None = None
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
        if not hasattr(os, "pidfd_open"):
            raise ConfigurationError("The python tool needs Linux, which alone can contain its code: leave it out.")
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._output_chars = output_chars
        self._slots = Slots(processes)
        self._namespaces = sandbox.namespaces_work()
        if not self._namespaces and os.getuid() == 0 and not sandbox.nobody_reads_python():
            raise ConfigurationError(
                f"The python tool runs as root without namespaces, so its code becomes user 65534, who may not read "
                f"{sys.base_prefix}: run as another user, or with a Python that all users may read."
            )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs `code`. An exception, a passed deadline, too much memory or output are results with `is_error`."""
        code = read_text(self.name, "code", arguments)
        if isinstance(code, ToolResult):
            return code
        async with self._slots.here():
            outcome = await sandbox.run(
                code,
                seconds=self._seconds,
                memory_mb=self._memory_mb,
                output_chars=self._output_chars,
                namespaces=self._namespaces,
            )
        output = outcome.output.rstrip("\n")
        if outcome.code == 0:
            return ToolResult(content=output or "(no output)")
        parts = [output, self._ending(outcome)]
        return ToolResult(content="\n".join(part for part in parts if part), is_error=True)

    async def close(self) -> None:
        """Does nothing: each call leaves nothing behind."""

    def _ending(self, outcome: sandbox.Outcome) -> str:
        """How a run ended that did not end well; nothing where a traceback has said it."""
        if outcome.stopped == "timeout":
            return f"The code was stopped: it may run for {self._seconds:g} s."
        if outcome.stopped == "flood":
            return f"The code was stopped: it printed over {sandbox.FLOOD_BYTES >> 20} MB."
        if outcome.code is None:
            return "The tool 'python' failed."
        if outcome.code > 128:
            try:
                name = signal.Signals(outcome.code - 128).name
            except ValueError:
                return f"The code ended with status {outcome.code}."
            return f"The code was killed by {name}."
        return "" if outcome.code == 1 and outcome.output else f"The code ended with status {outcome.code}."
