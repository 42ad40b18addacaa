"""A circuit breaker as a pure state machine: leaves a broken server alone for a while, then tries it once."""

from attrs import evolve, frozen


@frozen(kw_only=True)
class Circuit:
    """Circuit breaker: it opens after `limit` failures in a row. `cooldown` seconds later it lets one trial call
    through, whose outcome closes or opens it again. Times are seconds of any monotonic clock."""

    limit: int = 3
    cooldown: float = 10.0
    failures: int = 0
    opened_at: float | None = None

    def allows(self, now: float) -> bool:
        """Returns whether a call may be made."""
        return self.opened_at is None or now - self.opened_at >= self.cooldown

    def started(self, now: float) -> "Circuit":
        """Returns the state after the start of a call; while a trial runs, other calls wait."""
        return self if self.opened_at is None else evolve(self, opened_at=now)

    def succeeded(self) -> "Circuit":
        """Returns the state after a call that succeeded."""
        return evolve(self, failures=0, opened_at=None)

    def failed(self, now: float) -> "Circuit":
        """Returns the state after a call that failed."""
        failures = self.failures + 1
        return evolve(self, failures=failures, opened_at=now if failures >= self.limit else None)
