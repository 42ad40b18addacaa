"""The Tinker server's training runs: the order in which requests are worked on, and fail."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.tinker import wire
from rollgrad.adapters.servers.tinker.results import CANCELLED
from rollgrad.adapters.servers.tinker.service import Run, TinkerService
from rollgrad.application.learning.requested import RequestedTraining
from rollgrad.domain.ports.models import AdamRates


async def test_a_cancelled_request_fails_in_its_turn() -> None:
    """The requests before it are worked on first, though they have not begun when it is cancelled."""
    unused: Any = None
    service, told, free = TinkerService(unused, unused), list[str](), threading.Event()
    service._runs["run"] = Run(unused, unused)

    def work(name: str, *, waits: bool = False) -> str:
        def told_so() -> None:
            if waits:
                free.wait(60)
            told.append(name)

        return service._in_turn(
            "run", next(numbers), told_so, lambda _: {}, failed=lambda: told.append(f"{name} failed")
        )

    numbers = iter(range(1, 10))
    gradient, step, cancelled, after = work("gradient", waits=True), work("step"), work("cancelled"), work("after")
    await asyncio.sleep(0.01)
    service.results.cancel(cancelled)
    await asyncio.sleep(0.01)
    assert told == []
    free.set()
    for request_id in (gradient, step, after):
        assert await service.results.wait(request_id, 60) == {}
    assert told == ["gradient", "step", "cancelled failed", "after"]
    assert await service.results.wait(cancelled, 60) == CANCELLED
    service.close()


async def test_samples_without_a_number_are_refused() -> None:
    """The second would have the answer to the first."""
    unused: Any = None
    service = TinkerService(unused, unused)
    with pytest.raises(HttpError, match="seq_id is not set"):
        service.sample(SimpleNamespace(sampling_session_id="session:sample:0", seq_id=None))
    service.close()


def test_an_empty_stop_text_would_end_every_reply_at_once() -> None:
    given = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1, stop=["END", ""])
    with pytest.raises(HttpError, match="an empty text in stop is not supported"):
        wire.read_sampling(SimpleNamespace(sampling_params=given), 0, None)


class Policy:
    """Counts the gradients that it has accumulated, and those of each step, which waits until it is free."""

    def __init__(self) -> None:
        self.gradients = 0
        self.steps: list[int] = []
        self.stepping, self.free = threading.Event(), threading.Event()

    def step(self, rates: AdamRates) -> dict[str, float]:
        self.stepping.set()
        assert self.free.wait(60)
        self.steps.append(self.gradients)
        return {}

    def clear(self) -> None:
        self.gradients = 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_step_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """Whether its work has begun, which then goes on to its end, or not: the next step is taken with what was asked
    for after it."""
    policy: Any = Policy()
    unused: Any = None
    training = RequestedTraining(policy, pass_tokens=1)
    service = TinkerService(unused, unused)
    service._runs["run"] = Run(training, unused)
    rates = AdamRates(lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_norm=0.0)
    monkeypatch.setattr("rollgrad.adapters.servers.tinker.wire.read_rates", lambda request: rates)

    def add() -> None:
        policy.gradients += 1
        training.accumulated += 1

    def gradient(number: int) -> None:
        service._in_turn("run", number, add, lambda _: {})

    def step(number: int) -> str:
        return service.optim_step(SimpleNamespace(model_id="run", seq_id=number))

    gradient(1)
    first = step(2) if begun else None
    gradient(3)
    second = step(4)
    await asyncio.sleep(0)  # so that all have asked for their turns
    if first is not None:
        assert await asyncio.to_thread(policy.stepping.wait, 60)
        service.results.cancel(first)
        assert await service.results.wait(first, 60) == CANCELLED
    service.results.cancel(second)
    policy.free.set()
    gradient(5)
    assert await service.results.wait(step(6), 60) == {"metrics": {}}
    assert policy.steps == ([1, 1] if begun else [1])
    service.close()
