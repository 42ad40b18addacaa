"""Runs end by an error or go on, in time, whatever is raised by the code that they call.

See `test_injected_faults`, which does the same with the services by themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollgrad.domain.control.staleness import StalenessBound
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.metric_sink import FakeMetricSink
from rollgrad.testing.models import FakePolicy
from rollgrad.testing.prompt_source import FakePromptSource
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from rollgrad.testing.weight_channel import FakeWeightChannel
from tests.fakes.pipeline import GROUPS, make_run
from tests.integration.test_injected_faults import DEADLINE, Trap, each_fault

STEPS = 3
RUN_PLACES = [
    (FakeRolloutEngine, "generate"),
    (FakeRewardSource, "score"),
    (FakeChatCodec, "decode"),
    (FakePromptSource, "take"),
    (FakePolicy, "update"),
    (FakeWeightChannel, "push"),
    (FakeMetricSink, "log"),
]


def result(work: Awaitable[Any]) -> Any:
    """Returns its result or its error, within the deadline."""

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work

    try:
        return asyncio.run(bounded())
    except BaseException as error:
        return error


@each_fault
@pytest.mark.parametrize("bound", [None, StalenessBound(updates=STEPS, groups=GROUPS, max_staleness=1)], ids=repr)
@pytest.mark.parametrize(("place", "name"), RUN_PLACES, ids=[name for _, name in RUN_PLACES])
def test_a_run(
    fault: Callable[[], BaseException],
    place: Any,
    name: str,
    bound: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trap = Trap(monkeypatch, place, name)
    make_run(tmp_path, steps=STEPS, state_steps=1, evaluation=True, bound=bound).train()
    calls = trap.calls
    assert calls, "the scenario reaches the place"
    for at in sorted({0, calls // 2, calls - 1}):
        run = make_run(tmp_path, steps=STEPS, state_steps=1, evaluation=True, bound=bound)
        trap.arm(fault, at)
        found = result(run.pipeline.run())
        if isinstance(found, BaseException):
            assert not isinstance(found, TimeoutError | KeyboardInterrupt | asyncio.CancelledError), repr(found)
        else:
            assert not found.interrupted, "nobody interrupted it"
            assert found.steps == STEPS
        trap.arm(fault, -1)
