"""Reward and environment servers in processes of their own, which can be killed while somebody waits for an answer.

Run as a module it is one of them: its kind, its port (0 for a free one), and the number of the question that it leaves
unanswered (0 for none).
"""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from starlette.responses import JSONResponse, Response

from tests.fakes.environment_servers import nemo_gym_app, observation, openenv_app, serve
from tests.fakes.reward_server import RewardServer

ROOT = Path(__file__).resolve().parents[2]
HELD = "held"
SECONDS = 120.0


class ServerProcess:
    """A server at `url`. One that holds a question is killed as soon as it has it."""

    def __init__(self, kind: str, *, port: int = 0, held: int = 0) -> None:
        command = [sys.executable, "-m", "tests.fakes.server_process", kind, str(port), str(held)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        self.url = self._lines.readline().strip()
        self._killer = threading.Thread(target=self._kill_in_the_middle, daemon=True)
        if held:
            self._killer.start()

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].partition("/")[0])

    def was_killed(self) -> bool:
        """Returns whether it held its question, and is dead."""
        self._killer.join(SECONDS)
        return self._process.poll() is not None

    def _kill_in_the_middle(self) -> None:
        if self._lines.readline().strip() == HELD:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._lines.close()


class _Questions:
    def __init__(self, held: int) -> None:
        self._held = held
        self._count = 0

    def holds(self) -> bool:
        """Returns whether the next question is the one that is held."""
        self._count += 1
        if self._count == self._held:
            print(HELD, flush=True)
        return self._count == self._held


def _reward(port: int, held: int) -> None:
    questions = _Questions(held)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if questions.holds():
            threading.Event().wait()
        return 200, {"rewards": [len(set(query)) / 100 for query in body["query"]]}

    print(RewardServer(answer, port=port).url, flush=True)


def _openenv(port: int, held: int) -> None:
    questions = _Questions(held)

    async def step() -> dict[str, Any]:
        if questions.holds():
            await asyncio.Event().wait()
        return observation("no", False, -0.1, {})

    print(serve(openenv_app(hooks={"step": step})).__enter__(), flush=True)


def _nemo_gym(port: int, held: int) -> None:
    questions = _Questions(held)

    async def verify() -> Response:
        if questions.holds():
            await asyncio.Event().wait()
        return JSONResponse({"reward": 1.0})

    print(serve(nemo_gym_app(hooks={"/verify": verify})).__enter__(), flush=True)


if __name__ == "__main__":
    {"reward": _reward, "openenv": _openenv, "nemo_gym": _nemo_gym}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
    threading.Event().wait()
