"""Results that clients fetch later: each request is answered at once with an id, under which its result waits."""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.domain.errors import RollgradError, problem_lines

Answer = Mapping[str, Any] | bytes
"""A JSON object, or a message in protobuf."""

FETCHED_KEPT = 256
"""Results kept after they were fetched: a client whose connection broke asks again."""

CANCELLED: Answer = {"error": "The request was cancelled.", "category": "user"}

_log = structlog.get_logger()


class Results:
    """Work under way and its answers, in one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()

    def start(self, request_id: str, work: Coroutine[Any, Any, Answer]) -> None:
        """Starts work whose answer is asked for by `request_id`. A request that came before is not worked on again."""
        if request_id in self._tasks:
            work.close()
            return
        self._tasks[request_id] = asyncio.create_task(_answered(work), name=request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    async def wait(self, request_id: str, seconds: float) -> Answer | None:
        """Returns the answer; None if there is none after `seconds`.

        Raises:
            KeyError: there is no such request, or its answer was fetched long ago.
        """
        task = self._tasks[request_id]
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        self._fetched[request_id] = None
        while len(self._fetched) > FETCHED_KEPT:
            oldest, _ = self._fetched.popitem(last=False)
            self._tasks.pop(oldest, None)
        return CANCELLED if task.cancelled() else task.result()

    def forget(self, beginning: str) -> None:
        """Ends and forgets the work of all requests whose ids begin so."""
        for request_id in [found for found in self._tasks if found.startswith(beginning)]:
            self._tasks.pop(request_id).cancel()
            self._fetched.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """Ends work that nobody waits for any more; does nothing if it is unknown or done."""
        if request_id in self._tasks:
            self._tasks[request_id].cancel()


async def _answered(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Returns an answer, also of work that fails."""
    try:
        return await work
    except RollgradError as error:
        return {"error": " ".join(problem_lines(error)), "category": "user"}
    except asyncio.CancelledError:
        return CANCELLED
    except HttpError as error:
        return {"error": error.detail, "category": "user"}
    except Exception:
        _log.exception("request_failed")
        return {"error": "The server failed to answer; its log says why.", "category": "server"}
