"""Promises of every `StepSource` to its run: state, interruption and failure."""

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define

from rollgrad.application.interruption import urgent
from rollgrad.application.learning.examples import ExampleLearner
from rollgrad.application.pipelines import step_source
from rollgrad.application.pipelines.epochs import Epochs
from rollgrad.application.pipelines.step_source import StepReport, StepSource, TrainedModels
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.control.staleness import StalenessBound
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.errors import NonFiniteUpdateError
from rollgrad.domain.ports.models import PolicyObjective
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.models import VOCABULARY, FakePolicy
from tests.fakes.pipeline import GROUPS, make_run

STEPS = 4
DEADLINE_SECONDS = 60.0
RUNS_OWN = {"step", "update", "before", "groups", "evaluated"}
"""Keys of a training state that no source may use."""


class Policy(FakePolicy):
    """Refuses the update `fails`, counted from 0; before the update `waits` it says that it has begun, and goes on when
    it may."""

    def __init__(self) -> None:
        super().__init__(torch.linspace(-0.5, 0.5, VOCABULARY))
        self.fails: int | None = None
        self.waits: int | None = None
        self.begun, self.may = threading.Event(), threading.Event()

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        if len(self.updates) == self.fails:
            raise NonFiniteUpdateError("The loss is nan.")
        if len(self.updates) == self.waits:
            self.begun.set()
            assert self.may.wait(DEADLINE_SECONDS)
        return super().update(micro_batches, objective)


@define
class Subject:
    """A source, and what it trains."""

    source: StepSource[Any]
    models: TrainedModels
    policy: Policy

    def saved(self) -> dict[str, Any]:
        """A training state, as a checkpoint keeps it."""
        state = json.loads(json.dumps(self.source.state_dict()))
        models = self.models.state_dict()
        return copy.deepcopy({"state": state, "kept": self.source.kept_samples(), "models": models})


def alternating(path: Path) -> Subject:
    policy = Policy()
    run = make_run(path, steps=STEPS, policy=policy)
    return Subject(run.pipeline._steps, run.update, policy)


def overlapping(path: Path) -> Subject:
    policy = Policy()
    bound = StalenessBound(groups=GROUPS, updates=STEPS, max_staleness=0)
    run = make_run(path, steps=STEPS, policy=policy, bound=bound)
    return Subject(run.pipeline._steps, run.update, policy)


def reply(*tokens: int) -> WeightedTokens:
    weights_T = torch.tensor([0.0] + [1.0] * len(tokens))
    return WeightedTokens(token_ids_T=torch.tensor([1, *tokens]), weights_T=weights_T, prompt_length=1)


def epochs(path: Path) -> Subject:
    policy = Policy()
    pairs = [Preference(chosen=reply(10 + row, 2), rejected=reply(50 + row, 2), row=row) for row in range(5)]
    objective = PreferenceObjective(settings=PreferenceSettings(loss=("simpo",)))
    learner = ExampleLearner(policy, pack=pack_preferences, objective=objective, max_tokens=8)
    return Subject(Epochs(learner, pairs, batch_size=2, total=None, seed=3, clock=FakeClock()), learner, policy)


@pytest.fixture(params=[alternating, overlapping, epochs])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Subject]:
    return lambda: request.param(tmp_path)


async def steps(subject: Subject, first: int, count: int) -> list[dict[str, float]]:
    """Metrics of `count` steps from the one after `first`."""
    await subject.source.start(first)
    try:
        reports = [await subject.source.step(first + index) for index in range(count)]
    finally:
        await subject.source.stop()
    assert all(report.ended_by is None for report in reports)
    return [learned(report) for report in reports]


def learned(report: StepReport[Any]) -> dict[str, float]:
    """Metrics of the update without times, and the hand-over that an interruption leaves out."""
    return {name: value for name, value in report.metrics.items() if not name.startswith(("time/", "sync/"))}


def continued(make: Callable[[], Subject], saved: Mapping[str, Any]) -> Subject:
    subject = make()
    subject.source.load_state_dict(saved["state"], saved["kept"])
    subject.models.load_state_dict(saved["models"])
    return subject


async def test_a_run_that_continues_takes_the_same_steps(make: Callable[[], Subject]) -> None:
    whole, first = make(), make()
    wanted = await steps(whole, 0, STEPS)
    assert await steps(first, 0, 2) == wanted[:2]
    saved = first.saved()
    assert not RUNS_OWN & saved["state"].keys()
    second = continued(make, saved)
    assert await steps(second, 2, STEPS - 2) == wanted[2:]
    assert second.saved()["state"] == whole.saved()["state"]


async def test_a_step_that_fails_changes_nothing(make: Callable[[], Subject]) -> None:
    wanted = await steps(make(), 0, STEPS)
    broken = make()
    broken.policy.fails = 1
    with pytest.raises(NonFiniteUpdateError):
        await steps(broken, 0, STEPS)
    assert not broken.models.under_way
    assert await steps(continued(make, broken.saved()), 1, STEPS - 1) == wanted[1:]


@pytest.mark.parametrize("awaits", [0, 1, 2, 5, 9, 20, 1000])
async def test_an_interruption_is_between_two_steps(make: Callable[[], Subject], awaits: int) -> None:
    """Wherever the task is cancelled in the second step: it counts, and is reported, or it has not begun."""
    wanted = await steps(make(), 0, STEPS)
    subject = make()

    async def interrupted() -> int:
        """Finished steps."""
        await subject.source.start(0)
        await subject.source.step(0)
        task = asyncio.create_task(subject.source.step(1))
        for _ in range(awaits):
            await asyncio.sleep(0)
        task.cancel()
        try:
            report = await task
        except asyncio.CancelledError:
            return 1
        finally:
            await subject.source.stop()
        assert learned(report) == wanted[1]
        return 2

    done = await interrupted()
    assert not subject.models.under_way
    assert await steps(continued(make, subject.saved()), done, STEPS - done) == wanted[done:]


@pytest.mark.parametrize("hurry", [True, False], ids=["urgent", "in time"])
async def test_a_long_update_is_broken_off_before_its_optimizer_step(
    make: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    """It is where somebody may kill the run soon; else it is finished and counts. Nothing that was learned is lost."""
    monkeypatch.setattr(step_source, "PATIENCE_SECONDS", 0.01)
    wanted = await steps(make(), 0, STEPS)
    subject = make()
    subject.policy.waits = 1
    await subject.source.start(0)
    await subject.source.step(0)
    task = asyncio.create_task(subject.source.step(1))
    await asyncio.to_thread(subject.policy.begun.wait, DEADLINE_SECONDS)
    done = 1
    try:
        if hurry:
            urgent.set()
        task.cancel()
        await asyncio.sleep(0.1)  # ten times the patience
        subject.policy.may.set()
        assert learned(await task) == wanted[1]
        done = 2
    except asyncio.CancelledError:
        pass
    finally:
        urgent.clear()
        await subject.source.stop()
    assert done == (1 if hurry else 2)
    assert not subject.models.under_way
    assert await steps(continued(make, subject.saved()), done, STEPS - done) == wanted[done:]
