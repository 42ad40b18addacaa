"""An agent that is a program of its own."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping

from rollgrad.adapters.system.process_group import kill_group
from rollgrad.adapters.system.slots import Slots
from rollgrad.domain.episodes.messages import content_text
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask

KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "SSL_CERT_FILE",
)
"""Environment variables that a program inherits from this process; none of them holds a secret."""
MAX_OUTPUT = 2**20
"""Bytes of standard output and of standard error that are read; a program that writes more is stopped."""
SHOWN = 500
"""Characters of standard error in a failure's message."""
PROCESSES = 64
"""Programs that play at once, by default: an idle Python with an SDK takes some 60 MB."""
POLL_SECONDS = 0.2
"""Seconds between polls for the end of a program. asyncio's own `wait` would also wait for children that hold its
output open."""
END_SECONDS = 1.0
"""Seconds for which output is still read after the end of a program and its children. A process that holds the output
open for longer has left the program's process group."""


class CommandAgent(AgentProgram):
    """Runs `command` (split as by a shell, but run without one) in a process group of its own for each episode.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROLLGRAD_MODEL tell it the server, and
    ROLLGRAD_UNLEARNED_KEY the key of replies that nothing is learned from; its standard input is one line of JSON with
    `prompt` (text) and `messages`, never the label. The last line that it prints is its answer; if it prints nothing,
    the last reply is.

    Args:
        command: the program and its arguments.
        processes: how many run at once; other episodes wait, and the wait counts against their time limit.

    Raises:
        ConfigurationError: the command is empty, a quotation in it does not end, or there is no such program.
    """

    def __init__(self, command: str, *, processes: int = PROCESSES) -> None:
        self._slots = Slots(processes)
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise ConfigurationError(
                f"agent.command is {command!r}, which a shell could not read ({error}): correct --agent.command."
            ) from error
        if not self._command:
            raise ConfigurationError("agent.command is empty: give the program that plays with --agent.command.")
        if shutil.which(self._command[0]) is None:
            raise self._refusal("no program of this name may be run here")

    async def run(self, task: AgentTask) -> AgentResult:
        """Implements `AgentProgram.run`.

        Raises:
            ConfigurationError: there is no such program.
            RuntimeError: it failed, or its output was too long.
        """
        async with self._slots.here():
            return await self._play(task)

    def _refusal(self, reason: str | None) -> ConfigurationError:
        return ConfigurationError(
            f"agent.command starts {self._command[0]!r}, which cannot be run ({reason}): correct --agent.command."
        )

    async def _play(self, task: AgentTask) -> AgentResult:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(task),
                start_new_session=True,
                limit=MAX_OUTPUT,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise self._refusal(error.strerror) from error
        except asyncio.CancelledError:  # asyncio alone would end the program, and not what that has started by now
            ending = asyncio.create_task(_end_begun(starting))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):  # another one ends nothing sooner
                    await asyncio.wait([ending])
            raise
        said, complained = await _communicate(process, _input(task))
        if process.returncode != 0:
            raise RuntimeError(f"exit status {process.returncode}: {complained.strip()[-SHOWN:] or 'no message'}")
        # Not by splitlines, which ends lines at other characters, too, that JSON may hold as they are.
        return AgentResult(answer=said.strip().rpartition("\n")[2].strip() or None)


async def _communicate(process: asyncio.subprocess.Process, given: bytes) -> tuple[str, str]:
    """Returns standard output and standard error of the process; its children end with it."""
    assert process.stdout is not None
    assert process.stderr is not None
    said, complained = bytearray(), bytearray()
    parts = [_write(process, given), _read(process.stdout, said), _read(process.stderr, complained)]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        pending = set(tasks)
        while pending and process.returncode is None:
            done, pending = await asyncio.wait(pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        while process.returncode is None:  # it may close its outputs and run on
            await asyncio.sleep(POLL_SECONDS / 10)
        kill_group(process.pid)
        if pending:
            done, _ = await asyncio.wait(pending, timeout=END_SECONDS)
            for task in done:
                task.result()
    finally:
        await _end(process, *tasks)
    return said.decode(errors="replace"), complained.decode(errors="replace")


async def _end_begun(starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
    """Ends a program that is being started, with its children."""
    with contextlib.suppress(OSError):
        await _end(await starting)


async def _end(process: asyncio.subprocess.Process, *tasks: "asyncio.Task[None]") -> None:
    """Ends a process with its children, and what reads and writes its pipes."""
    kill_group(process.pid)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS / 10)
    process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipes


async def _write(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    while chunk := await stream.read(65536):
        into += chunk
        if len(into) > MAX_OUTPUT:
            raise RuntimeError(f"the program wrote more than {MAX_OUTPUT} bytes")


def _input(task: AgentTask) -> bytes:
    said = {"prompt": _last_message(task), "messages": list(task.prompt.messages)}
    return json.dumps(said, ensure_ascii=False, default=str).encode() + b"\n"


def _last_message(task: AgentTask) -> str:
    """Returns the latest message of the prompt's conversation."""
    return content_text(task.prompt.messages[-1]["content"]) if task.prompt.messages else task.prompt.text


def _environment(task: AgentTask) -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {
        **kept,
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.root_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "ROLLGRAD_MODEL": task.model,
        "ROLLGRAD_UNLEARNED_KEY": task.unlearned_key,
    }
