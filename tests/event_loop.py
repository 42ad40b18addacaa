"""One event loop for the tests of things that serve one only."""

import asyncio
from typing import Any

_RUNNER = asyncio.Runner()

SECONDS = 500
"""After which a test has hung: vLLM takes more than a minute to start on a busy machine."""


def run(work: Any) -> Any:
    """The result of an awaitable, within `SECONDS`."""

    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS):
            return await work

    return _RUNNER.run(bounded())
