"""A function of a user's that blocks the event loop is named, with its line; nothing else is."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.system.blocked_loop import reporting_blocks


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as caught:
        yield caught


def users(tmp_path: Path, source: str) -> Callable[[object], object]:
    namespace: dict[str, Callable[[object], object]] = {}
    exec(compile(source, str(tmp_path / "environment.py"), "exec"), namespace)
    return namespace["step"]


async def test_what_blocks_is_named_until_it_ends(tmp_path: Path, logs: list[Any]) -> None:
    step = users(tmp_path, "import time\nasync def step(logs):\n    while len(logs) < 2:\n        time.sleep(0.01)\n")
    with reporting_blocks("run", 0.05):
        answer = step(logs)
        assert inspect.isawaitable(answer)
        async with asyncio.timeout(60):
            await answer
        said = list(logs)
        await asyncio.sleep(0.3)  # free again
    assert [log["seconds"] for log in said[:2]] == [0.05, 0.1]
    assert str(said[0]["where"]).startswith("environment.py, line")
    assert len(logs) - len(said) <= 1, "at most the one that was being written"


async def test_what_awaits_and_what_is_no_users_is_not_named(tmp_path: Path, logs: list[Any]) -> None:
    step = users(tmp_path, "import asyncio\nasync def step(logs):\n    await asyncio.sleep(0.3)\n")
    with reporting_blocks("run", 0.05):
        answer = step(logs)
        assert inspect.isawaitable(answer)
        await answer
    assert logs == []
