"""How far a command over many rows is: a bar on a terminal, lines in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

LINES = 20
"""Approximate number of lines in a log file that say how far it is."""

log = structlog.get_logger(__name__)


@contextmanager
def progress(doing: str, total: int, done: int) -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal, and elsewhere a line now and then; yields the function that moves it by a row."""
    if not sys.stderr.isatty():
        yield _lines(doing, total, done)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total, completed=done)
        yield lambda: bar.advance(task)


def _lines(doing: str, total: int, done: int) -> Callable[[], None]:
    def advance() -> None:
        nonlocal done
        before, done = done, done + 1
        if before * LINES // total < done * LINES // total:
            log.info(doing.lower(), done=done, of=total)

    return advance
