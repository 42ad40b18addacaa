"""One event loop for the tests of things that serve one only."""

import asyncio
from typing import Any

_RUNNER = asyncio.Runner()

SECONDS = 120
"""After which a test has hung: vLLM on a busy machine takes 20."""


def run(work: Any) -> Any:
    """The result of an awaitable, within `SECONDS`."""

    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS):
            return await work

    return _RUNNER.run(bounded())
