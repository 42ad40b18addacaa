"""A `Clock` that moves when told."""

from rollgrad.domain.ports.clock import Clock


class FakeClock(Clock):
    """Stands at `now` seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """Returns `now`."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock forwards."""
        assert seconds >= 0, "a monotonic clock does not go back"
        self.now += seconds
