"""An agent that is a program of its own."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping

from rollgrad.adapters.system.slots import Slots
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
"""What a program sees of this process's environment: no token is among them."""
MAX_OUTPUT = 2**20
"""Bytes of standard output and of standard error that are read; a program that writes more is stopped."""
SHOWN = 500
"""Characters of standard error in a failure's message."""
PROCESSES = 64
"""Programs that play at once, by default: an idle Python with an SDK takes some 60 MB."""
POLL_SECONDS = 0.2
"""How often it is looked whether a program has ended whose output others still hold open: asyncio's own `wait` waits
for them too."""
END_SECONDS = 1.0
"""How long output stays open behind the end of a program and its children; whoever holds it then has left its group."""


class CommandAgent(AgentProgram):
    """Runs `command` (split as a shell would, without a shell) in a process group of its own for each episode.

    It finds the server in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROLLGRAD_MODEL,
    and on standard input one line of JSON with `prompt` (text) and `messages`; never the label. The last line that it
    prints is its answer; nothing printed leaves the last reply as the answer.

    Args:
        command: the program and its arguments.
        processes: how many run at once; other episodes wait, which counts as their time.

    Raises:
        ConfigurationError: the command is empty, or a quotation in it does not end.
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

    async def run(self, task: AgentTask) -> AgentResult:
        """Implements `AgentProgram.run`.

        Raises:
            ConfigurationError: there is no such program.
            RuntimeError: it failed, or wrote too much.
        """
        async with self._slots.here():
            return await self._play(task)

    async def _play(self, task: AgentTask) -> AgentResult:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(task),
                start_new_session=True,
                limit=MAX_OUTPUT,
            )
        except OSError as error:
            raise ConfigurationError(
                f"agent.command starts {self._command[0]!r}, which cannot be run ({error.strerror}): correct "
                "--agent.command."
            ) from error
        said, complained = await _talk(process, _input(task))
        if process.returncode != 0:
            raise RuntimeError(f"exit status {process.returncode}: {complained.strip()[-SHOWN:] or 'no message'}")
        lines = said.strip().splitlines()
        return AgentResult(answer=lines[-1].strip() if lines else None)


async def _talk(process: asyncio.subprocess.Process, given: bytes) -> tuple[str, str]:
    """What the process writes to its outputs until it ends; its children end with it."""
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
        while process.returncode is None:  # it goes on without outputs
            await asyncio.sleep(POLL_SECONDS / 10)
        _kill(process)
        if pending:
            done, _ = await asyncio.wait(pending, timeout=END_SECONDS)
            for task in done:
                task.result()
    finally:
        _kill(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while process.returncode is None:
            await asyncio.sleep(POLL_SECONDS / 10)
        process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipes
    return said.decode(errors="replace"), complained.decode(errors="replace")


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


def _kill(process: asyncio.subprocess.Process) -> None:
    """Ends the program and what it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _input(task: AgentTask) -> bytes:
    said = {"prompt": _question(task), "messages": list(task.prompt.messages)}
    return json.dumps(said, ensure_ascii=False, default=str).encode() + b"\n"


def _question(task: AgentTask) -> str:
    """Returns the latest message of the prompt's conversation."""
    return str(task.prompt.messages[-1]["content"]) if task.prompt.messages else task.prompt.text


def _environment(task: AgentTask) -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {
        **kept,
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.root_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "ROLLGRAD_MODEL": task.model,
    }
