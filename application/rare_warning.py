"""Warnings of what may happen very often."""

from typing import Any

import structlog

log = structlog.get_logger(__name__)


class RareWarning:
    """Reports the first, second, fourth, eighth ... time of an event: what fails now and then in a run of days would
    else fill its log."""

    def __init__(self) -> None:
        self._times = 0

    def tell(self, event: str, **facts: Any) -> None:
        """Counts the event, and reports it if that is due."""
        self._times += 1
        if self._times.bit_count() == 1:
            log.warning(event, **facts, times=self._times)
