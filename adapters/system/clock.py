"""The computer's monotonic clock."""

import time

from rollgrad.domain.ports.clock import Clock


class SystemClock(Clock):
    """Time as the operating system keeps it."""

    def monotonic(self) -> float:
        """Returns seconds from an arbitrary origin; never goes back."""
        return time.monotonic()
