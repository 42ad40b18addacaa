"""How far a pass over many rows is: a bar on a terminal, a line every ten seconds in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import structlog

SECONDS_BETWEEN = 10.0
"""Seconds between lines; a pass that takes less has none."""

log = structlog.get_logger(__name__)
Item = TypeVar("Item")


def passing(
    items: Iterable[Item],
    doing: str,
    total: int,
    *,
    bar_from: int,
    rows: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Yields `items`, and shows how far it is.

    Args:
        items: parts of the pass.
        doing: what is done, as words.
        total: number of rows of all items.
        bar_from: number of rows from which on a terminal gets a bar.
        rows: rows of an item; the last may have fewer.
        clock: returns seconds.
    """
    if not sys.stderr.isatty():
        yield from _with_lines(items, doing, total, rows, clock)
    elif total < bar_from:
        yield from items
    else:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        yield from track(items, doing, total=-(-total // rows), console=console, transient=True)


def _with_lines(items: Iterable[Item], doing: str, total: int, rows: int, clock: Callable[[], float]) -> Iterator[Item]:
    told = clock()
    for number, item in enumerate(items):
        if clock() - told >= SECONDS_BETWEEN:
            told = clock()
            log.info(doing, done=number * rows, of=total)
        yield item
