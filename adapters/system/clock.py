"""The computer's monotonic clock."""

import time

from rollgrad.domain.ports.clock import Clock


class SystemClock(Clock):
    """A `Clock` that reads the operating system's monotonic clock."""

    def monotonic(self) -> float:
        """Returns seconds from an arbitrary origin; never goes back."""
        return time.monotonic()
