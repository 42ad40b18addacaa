"""An error that work raises is its own, whether or not an event loop runs already."""

import asyncio
from collections.abc import Callable

import pytest

from rollgrad.adapters.system.event_loop import run_to_end


async def fails() -> None:
    raise ValueError("no such order")


async def inside() -> None:
    run_to_end(fails())


@pytest.mark.parametrize("started", [lambda: run_to_end(fails()), lambda: asyncio.run(inside())], ids=["out", "in"])
def test_an_error_is_not_told_as_if_a_missing_loop_had_caused_it(started: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="no such order") as caught:
        started()
    assert caught.value.__context__ is None
