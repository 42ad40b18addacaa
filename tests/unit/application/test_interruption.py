"""An update heeds that it is to stop until it has changed a model; nothing else heeds it."""

import asyncio

import pytest

from rollgrad.application.interruption import BrokenOffError, Stop, close_to_stops, heed_stop


def test_an_update_heeds_a_stop_until_it_has_changed_a_model() -> None:
    stop = Stop()

    def update() -> None:
        heed_stop()
        stop.asked = True
        with pytest.raises(BrokenOffError):
            heed_stop()
        close_to_stops()
        heed_stop()

    async def run() -> None:
        await stop.begin(asyncio.to_thread(update))
        heed_stop()

    asyncio.run(run())
    assert stop.closed


def test_what_is_no_update_heeds_nothing() -> None:
    heed_stop()
    close_to_stops()
    heed_stop()
