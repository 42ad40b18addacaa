"""Notices that a user's function blocks the event loop, for which the whole run or server waits, and says where."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog

from rollgrad.application.foreign import users_place

BLOCKED_SECONDS = 60.0
"""Time after which a blocked event loop is reported, and again after twice, four times, ... as long."""
ASK_SECONDS = 5.0
"""Time between two questions whether it is free."""

log = structlog.get_logger(__name__)


@contextmanager
def reporting_blocks(waits: str, seconds: float = BLOCKED_SECONDS) -> Iterator[None]:
    """Warns inside the block where a user's function blocks the running event loop for `seconds`: an `async def` that
    waits without `await`. Nothing that runs in the loop can say so, for all of it `waits`."""
    loop, thread, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()

    def watch() -> None:
        while not over.wait(min(ASK_SECONDS, seconds)):
            free, waited, longest = threading.Event(), 0.0, seconds
            try:
                loop.call_soon_threadsafe(free.set)
            except RuntimeError:  # it is closed
                return
            while not over.is_set() and not free.wait(longest - waited):
                waited, longest = longest, 2 * longest
                if place := users_place(frames_of(thread)):
                    log.warning(
                        f"a function blocks the {waits}: it is asynchronous, but waits without await; make it a plain "
                        "one, which runs in a thread, or let it await",
                        where=place,
                        seconds=waited,
                    )

    threading.Thread(target=watch, name="blocked-loop", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def frames_of(thread: int) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames that the event loop of a thread runs now, as `frames_in_loop` does."""
    return frames_in_loop(sys._current_frames().get(thread))


def frames_in_loop(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames, each with its line, the innermost first, that the event loop runs; not those that run it."""
    while frame is not None and frame.f_code.co_name != "_run_once":
        yield frame, frame.f_lineno
        frame = frame.f_back
