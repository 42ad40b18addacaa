"""Logs what a run waits for: processes, models, engines, groups. Short waits are not logged."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

AFTER_SECONDS = 5.0
"""Seconds before a wait is logged."""
EVERY_SECONDS = 15.0
"""Seconds between two lines of a wait."""

log = structlog.get_logger(__name__)


@contextmanager
def waiting_for(
    what: str, *, deadline: float | None = None, after: float = AFTER_SECONDS, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Logs the wait for `what` inside the block: its beginning, that it continues, and how long it took.

    The lines come from another thread, so the block may block this one, or its event loop. If the block raises, the end
    of the wait is not logged.

    Args:
        what: a noun, with its number: "2 engines to start".
        deadline: longest wait in seconds, which is only logged; None if there is none.
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
