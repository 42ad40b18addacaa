"""Log of the commands, and of programs that use rollgrad as a library."""

import logging
import sys
from contextlib import suppress
from typing import Any

from rollgrad.entrypoints.terminal_text import without_commands


def configure_logging() -> None:
    """Sends structlog's events to stderr: coloured on a terminal, else one key=value line each."""
    import structlog

    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _harmless,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # looked up anew: while a progress bar is shown, it stands for stderr, and prints lines above itself
        logger_factory=lambda *_: _Lines(),
    )


def _harmless(logger: Any, level: str, event: Any) -> Any:
    """Takes commands to the terminal out of an event, which quotes models, servers and programs."""
    return {name: without_commands(value) if isinstance(value, str) else value for name, value in event.items()}


class _Lines:
    """Prints lines to stderr. One that cannot be written, where a pipe's reader is gone, a disk is full or users' code
    has closed the stream, is lost: it would end the run, and what saves the training then logs, too."""

    def __getattr__(self, level: str) -> Any:
        return self._print

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")  # in one piece: other threads write, too
            sys.stderr.flush()


def log_by_default() -> None:
    """Does as `configure_logging` in a program that has not configured structlog, whose own default is standard output,
    and tracebacks with the values of all variables, among which secrets may be. What the program configures later
    holds."""
    import structlog

    if not structlog.is_configured():
        configure_logging()
