"""Port: time."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Tells the time. Promises: `monotonic` never goes back."""

    def monotonic(self) -> float:
        """Returns seconds from an arbitrary origin."""
        ...
