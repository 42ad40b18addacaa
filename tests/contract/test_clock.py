"""Promises of every clock."""

import pytest

from rollgrad.adapters.system.clock import SystemClock
from rollgrad.domain.ports.clock import Clock
from rollgrad.testing.clock import FakeClock


@pytest.mark.parametrize("clock", [FakeClock(5.0), SystemClock()], ids=["fake", "system"])
def test_it_never_goes_back(clock: Clock) -> None:
    assert isinstance(clock, Clock)
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)


def test_the_fake_moves_when_told() -> None:
    clock = FakeClock()
    clock.advance(2.5)
    assert clock.monotonic() == 2.5
