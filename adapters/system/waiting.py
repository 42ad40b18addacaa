"""Says on the log what a run waits for: processes, models, engines, groups. Short waits are not told."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

AFTER_SECONDS = 5.0
"""Waits that end sooner say nothing."""
EVERY_SECONDS = 15.0
"""Between two lines of a wait."""

log = structlog.get_logger(__name__)


@contextmanager
def waiting_for(
    what: str, *, deadline: float | None = None, after: float = AFTER_SECONDS, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Logs the wait for `what` that the block is: when it has begun, that it goes on, and how long it took.

    The lines come from a thread, so the block may hold this one, or its event loop. A block that raises leaves the last
    word to its error.

    Args:
        what: a noun, with its number: "2 engines to start".
        deadline: seconds that the block gives it, for the lines only; None if it has none.
        after: seconds without a line.
        every: seconds between lines.
    """
    over, told = threading.Event(), False
    began = time.monotonic()

    def tell() -> None:
        nonlocal told
        if over.wait(after):
            return
        told = True
        log.info(f"waiting for {what} ({'no deadline' if deadline is None else f'at most {deadline:g} s'})")
        while not over.wait(every):
            passed = f"{time.monotonic() - began:.0f} s"
            log.info(f"still waiting for {what} ({passed if deadline is None else f'{passed} of {deadline:g} s'})")

    thread = threading.Thread(target=tell, name=f"waiting for {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if told:
        log.info(f"done waiting for {what} ({time.monotonic() - began:.0f} s)")
