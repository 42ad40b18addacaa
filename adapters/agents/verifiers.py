"""Environments of the package verifiers, as agents: each plays its own loop as a client of the run's server.

They run in a process of their own Python, because the package pins other versions than rollgrad does
(`verifiers_worker.py` is what runs there). Invariant: the server's session has the exact tokens, whatever the
environment does with the texts. Does not own: the environment's package, which is installed in that Python.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.agents import verifiers_worker
from rollgrad.adapters.agents.function import agent_result
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.adapters.system.process_group import kill_group
from rollgrad.domain.errors import ConfigurationError, DataError, ForeignError
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask
from rollgrad.domain.ports.closing import AsyncClosable

log = structlog.get_logger(__name__)

COLUMN = "verifiers"
"""Column of the rows with what the environment takes, as JSON."""
MAX_LINE = 2**28
"""Largest number of bytes of an answer."""
SHOWN = 1000
"""Bytes of the environment's log in an error."""
READY = -1
"""Number of what the process says before it is asked."""
START_SECONDS = 600.0
"""Longest time for loading an environment, which may download its rows."""
END_SECONDS = verifiers_worker.END_SECONDS + 5.0
"""Seconds that the process has to end, which ends itself where the environment does not, before it is killed."""
QUIET_SECONDS = 10.0
"""Seconds after which the log says what is waited for, and a process that has loaded nothing is killed."""
POLL_SECONDS = 0.1
"""Seconds between polls for the end of the process, whose children may hold its outputs open."""
READ_SECONDS = 1.0
"""Seconds for which what a process has written is still read after its end."""


class VerifiersAgent(AgentProgram, AsyncClosable):
    """Plays the episodes of one environment; its reward and metrics are those of the environment's rubric.

    One process of `python` plays all of them. It starts with the first and ends with the run; if it dies, the episodes
    in it fail, and the next starts another.

    Args:
        env_id: the environment, as `vf-eval` takes it.
        env_args: arguments of its `load_environment`, which no command line shows; from verifiers 0.4 on the settings
            of the run's `[env]` block.
        python: the interpreter in which verifiers and the environment are installed; default: this one.
    """

    def __init__(self, env_id: str, *, env_args: Mapping[str, Any] | None = None, python: str = sys.executable) -> None:
        self._env_id = env_id
        self._env_args = dict(env_args or {})
        self._python = python
        self._worker: _Worker | None = None

    def write_rows(self, path: str, *, split: str = "train") -> int:
        """Writes the environment's rows as a dataset (.jsonl) for data.prompt_dataset or eval.dataset.

        Args:
            path: the file; one that is there is overwritten.
            split: train, or eval for those that the environment holds out (`load_environment` alone has them).

        Returns:
            the number of rows.

        Raises:
            ConfigurationError: the environment cannot be loaded in `python`.
            DataError: it has no such rows, or one is no JSON.
        """

        async def write() -> int:
            try:
                rows = await self.rows(split)
            finally:
                await self.aclose()
            Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
            return len(rows)

        return run_to_end(write())

    async def rows(self, split: str) -> list[dict[str, Any]]:
        """Returns what `write_rows` writes."""
        worker = await self._started()
        found: list[dict[str, Any]] = []
        while True:
            said = await worker.ask({"rows": split})
            if "error" in said:
                raise DataError(f"The environment {self._env_id} gives no rows for {split}: {said['error']}")
            if not said["rows"]:
                return found
            found += (_row(number, row) for number, row in enumerate(said["rows"], start=len(found)))

    async def run(self, task: AgentTask) -> AgentResult:
        """Implements `AgentProgram.run`.

        Raises:
            ConfigurationError: the environment cannot be loaded, or the prompt is none of its rows.
            ForeignError: the episode failed.
        """
        row = task.prompt.metadata.get(COLUMN)
        if not isinstance(row, str):
            raise ConfigurationError(
                f"A prompt of {task.prompt.datasource!r} is no row of the environment {self._env_id}: write its rows "
                "with VerifiersAgent.write_rows, and give the files with --data.prompt_dataset and --eval.dataset."
            )
        worker = await self._started()
        keys = {"api_key": task.api_key, "unlearned_key": task.unlearned_key}
        said = await worker.ask({"row": row, "base_url": task.base_url, "model": task.model, **keys})
        if "error" in said:
            raise ForeignError(f"The environment {self._env_id} failed: {said['error']}")
        try:
            return agent_result(said)
        except ForeignError as error:
            raise ForeignError(f"The environment {self._env_id} failed: {error}") from error

    async def aclose(self) -> None:
        """Ends the process; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.aclose()

    async def _started(self) -> "_Worker":
        worker = self._worker
        if worker is None or worker.is_over:
            over, worker = worker, _Worker(self._start)
            self._worker = worker  # before any wait: other episodes must not start one more
            if over is not None:
                await asyncio.shield(over.aclose())
        await asyncio.shield(worker.starting)  # an episode that is cancelled leaves it to the others
        return worker

    async def _start(self) -> asyncio.subprocess.Process:
        arguments = json.dumps(self._env_args).encode()
        # -P: Python would look for packages in the folder of the worker first, where this module is `verifiers`
        command = [self._python, "-P", verifiers_worker.__file__, self._env_id]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                start_new_session=True,  # Ctrl-C is the run's, which ends it
            )
        except OSError as error:
            raise ConfigurationError(
                f"VerifiersAgent has the python {self._python!r}, which cannot be run ({error.strerror}): give the "
                "interpreter in which verifiers is installed."
            ) from error
        assert process.stdin is not None
        process.stdin.write(arguments + b"\n")
        return process


class _Worker:
    """A process that answers questions by their numbers, many at once. `starting` ends when it is ready."""

    def __init__(self, start: Callable[[], Awaitable[asyncio.subprocess.Process]]) -> None:
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._log = b""
        self._parts: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None
        self.starting = asyncio.create_task(self._start(start))

    @property
    def is_over(self) -> bool:
        """Whether no question is answered any more."""
        return any(part.done() for part in self._parts)

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question; if the process dies, an `error`. Cancelling it cancels the episode."""
        number, self._count = self._count, self._count + 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            if self.is_over:
                return self._end()
            self._tell({"id": number, **question})
            return await answer
        except asyncio.CancelledError:
            self._tell({"cancel": number})
            raise
        finally:
            del self._asked[number]

    async def aclose(self) -> None:
        """Ends the process: its input ends, upon which it tears down what it has loaded; what it leaves behind is
        killed."""
        self.starting.cancel()
        (failure,) = await asyncio.gather(self.starting, return_exceptions=True)
        process, ending = self._process, self._ending
        if process is None or ending is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        _, ends = await asyncio.wait([ending], timeout=QUIET_SECONDS)
        if ends and failure is None:
            log.info("waiting for the environment to tear down", killed_after_seconds=END_SECONDS)
            _, ends = await asyncio.wait(ends, timeout=END_SECONDS - QUIET_SECONDS)
        if ends:  # else another process may have its number by now
            kill_group(process.pid)
        await ending

    async def _start(self, start: Callable[[], Awaitable[asyncio.subprocess.Process]]) -> None:
        self._process = process = await start()
        assert process.stdout is not None
        assert process.stderr is not None
        ready = self._asked[READY] = asyncio.get_running_loop().create_future()
        self._parts = [asyncio.create_task(self._read(process.stdout)), asyncio.create_task(self._keep(process.stderr))]
        self._ending = asyncio.create_task(self._end_with(process))
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await ready
        except TimeoutError as error:
            raise ConfigurationError(f"The environment was not loaded within {START_SECONDS:.0f} seconds.") from error
        finally:
            del self._asked[READY]
        if "ready" not in said:
            raise ConfigurationError(said.get("refused") or f"The environment does not start: {said['error']}")

    async def _end_with(self, process: asyncio.subprocess.Process) -> None:
        """Ends with the process, also when children that it left behind hold its outputs open: no answer follows."""
        while process.returncode is None:  # `wait` would wait for those children
            await asyncio.sleep(POLL_SECONDS)
        kill_group(process.pid)
        _, unread = await asyncio.wait(self._parts, timeout=READ_SECONDS)
        for part in unread:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)  # a line that was cut off is no answer
        process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipes

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                said = json.loads(line)
                self._answer(said.pop("id", READY), said)
        finally:
            for number in list(self._asked):
                self._answer(number, self._end())

    def _answer(self, number: int, said: dict[str, Any]) -> None:
        waiting = self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(said)

    async def _keep(self, log: asyncio.StreamReader) -> None:
        while chunk := await log.read(65536):
            self._log = (self._log + chunk)[-SHOWN:]

    def _end(self) -> dict[str, Any]:
        return {"error": f"its process ended: {self._log.decode(errors='replace').strip() or 'it wrote no reason'}"}


def _row(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the dataset. Its prompt is to be read and to be counted: the environment sends its own."""
    prompt = row["prompt"] or f"Task {number}"
    answer = row["answer"]
    return {"prompt": prompt, "answer": answer if isinstance(answer, str) else "", COLUMN: row["row"]}
