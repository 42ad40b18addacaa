"""An agent that is a program of its own."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping

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


class CommandAgent(AgentProgram):
    """Runs `command` (split as a shell would, without a shell) in a process group of its own for each episode.

    It finds the server in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROLLGRAD_MODEL,
    and on standard input one line of JSON with `prompt` (text) and `messages`; never the label. The last line that it
    prints is its answer; nothing printed leaves the last reply as the answer.

    Raises:
        ConfigurationError: the command is empty.
    """

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)
        if not self._command:
            raise ConfigurationError("agent.command is empty: give the program that plays with --agent.command.")

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`.

        Raises:
            ConfigurationError: there is no such program.
            RuntimeError: it failed, or wrote too much.
        """
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
        try:
            said, complained = await _talk(process, _input(task))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            await process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"exit status {process.returncode}: {complained.strip()[-SHOWN:] or 'no message'}")
        lines = said.strip().splitlines()
        return AgentResult(answer=lines[-1] if lines else None)


async def _talk(process: asyncio.subprocess.Process, given: bytes) -> tuple[str, str]:
    """What the process writes until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()
    said, complained = await asyncio.gather(_read(process.stdout), _read(process.stderr))
    await process.wait()
    return said, complained


async def _read(stream: asyncio.StreamReader) -> str:
    received = bytearray()
    while chunk := await stream.read(65536):
        received += chunk
        if len(received) > MAX_OUTPUT:
            raise RuntimeError(f"the program wrote more than {MAX_OUTPUT} bytes")
    return received.decode(errors="replace")


def _input(task: AgentTask) -> bytes:
    said = {"prompt": _question(task), "messages": list(task.prompt.messages)}
    return json.dumps(said, ensure_ascii=False, default=str).encode() + b"\n"


def _question(task: AgentTask) -> str:
    """The latest message of the prompt's conversation."""
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
