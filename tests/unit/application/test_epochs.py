"""Epochs over examples: every example once an epoch, the same steps after an interruption, one batch however it is
split."""

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.application.learning.examples import ExampleLearner, together
from rollgrad.application.pipelines.epochs import Epochs, ExampleEvaluation, TokenBudget, next_examples, steps_left
from rollgrad.application.pipelines.run import Run
from rollgrad.application.pipelines.schedule import RunOutcome, Schedule
from rollgrad.application.pipelines.step_callback import RunAccess, StopTraining
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.losses.reward_model import RewardObjective
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import CheckpointError, ConfigurationError, ForeignError, NonFiniteUpdateError
from rollgrad.domain.ports.example_source import ExampleStream
from rollgrad.domain.ports.models import PolicyObjective
from rollgrad.testing.checkpoint_store import FakeCheckpointStore
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.metric_sink import FakeMetricSink, FakeRunTracker
from rollgrad.testing.models import FakePolicy, FakeValue

PAIRS, BATCH, EPOCHS = 5, 2, 2
TOTAL = PAIRS * EPOCHS
STEPS = -(-TOTAL // BATCH)
OBJECTIVE = PreferenceObjective(settings=PreferenceSettings(loss=("simpo",)))
"""A loss without a reference."""


def pair(row: int) -> Preference:
    """Token `row + 10` is preferred to `row + 50`."""
    chosen, rejected = (
        WeightedTokens(
            token_ids_T=torch.tensor([1, token, 2]), weights_T=torch.tensor([0.0, 1.0, 1.0]), prompt_length=1
        )
        for token in (row + 10, row + 50)
    )
    return Preference(chosen=chosen, rejected=rejected, row=row)


EXAMPLES = [pair(row) for row in range(PAIRS)]
HELD_OUT = [evolve(pair(row), row=-1) for row in range(2)]


class Trained:
    """A run over `EXAMPLES`; `rows` are those of each step."""

    def __init__(
        self,
        path: Path,
        policy: FakePolicy | None = None,
        *,
        max_tokens: int = 100,
        steps: int = STEPS,
        total: int | None = TOTAL,
        best_metric: str | None = None,
        patience: int | None = None,
        budget: TokenBudget | None = None,
        on_step: Callable[..., Any] | None = None,
    ) -> None:
        self.policy = policy or FakePolicy()
        self.store, self.sink = FakeCheckpointStore(path), FakeMetricSink()
        self.rows: list[list[int]] = []
        learner = ExampleLearner(self.policy, pack=self.pack, objective=OBJECTIVE, max_tokens=max_tokens)
        self.run = Run(
            schedule=Schedule(steps=steps, eval_steps=2, state_steps=1, best_metric=best_metric, patience=patience),
            steps=Epochs(learner, EXAMPLES, batch_size=BATCH, total=total, seed=3, clock=FakeClock(), budget=budget),
            models=learner,
            evaluation=ExampleEvaluation(learner, HELD_OUT),
            sink=self.sink,
            sample_log=None,
            checkpoints=self.store,
            clock=FakeClock(),
            watch=LearningWatch(LearningSettings(steps=STEPS)),
            description={},
            less_memory="",
            on_step=on_step,
        )

    def pack(self, pairs: Sequence[Preference]) -> PackedBatch:
        self.rows.append([pair.row for pair in pairs])
        return pack_preferences(pairs)

    @property
    def trained(self) -> list[list[int]]:
        """Rows of the optimizer steps."""
        return [rows for rows in self.rows if -1 not in rows]

    @property
    def table(self) -> torch.Tensor:
        return dict(self.policy.weights())["logits"]


async def play(trained: Trained) -> RunOutcome:
    return await trained.run.run()


async def test_every_example_is_learned_from_once_an_epoch(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    outcome = await play(trained)
    drawn = [row for rows in trained.trained for row in rows]
    assert outcome.steps == STEPS
    assert [len(rows) for rows in trained.trained] == [2, 2, 2, 2, 2]
    assert sorted(drawn[:PAIRS]) == sorted(drawn[PAIRS:]) == list(range(PAIRS))
    assert drawn[:PAIRS] != drawn[PAIRS:], "each epoch has an order of its own"
    losses = [m["eval/loss"] for _, m in trained.sink.records if "eval/loss" in m]
    assert (outcome.before["eval/loss"], outcome.after["eval/loss"]) == (losses[0], losses[-1])
    assert losses == sorted(losses, reverse=True)
    assert outcome.after["eval/accuracy"] == 1.0
    epochs = [m["train/epoch"] for _, m in trained.sink.records if "train/epoch" in m]
    assert epochs == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


async def test_each_finished_step_is_told_to_the_caller(tmp_path: Path) -> None:
    told: list[tuple[int, Mapping[str, float]]] = []
    trained = Trained(tmp_path, on_step=lambda step, metrics, samples: told.append((step, metrics)))
    await play(trained)
    assert [step for step, _ in told] == [1, 2, 3, 4, 5]
    assert told == [record for record in trained.sink.records if "train/epoch" in record[1]]


async def test_the_caller_adds_metrics_to_the_row_of_a_step(tmp_path: Path) -> None:
    trained = Trained(tmp_path, on_step=lambda step, metrics, samples: {"mine/twice": 2 * step} if step > 3 else None)
    await play(trained)
    rows = [(step, metrics.get("mine/twice")) for step, metrics in trained.sink.records if "train/epoch" in metrics]
    assert rows == [(1, None), (2, None), (3, None), (4, 8.0), (5, 10.0)]


async def test_the_caller_ends_the_run_as_its_last_step_does(tmp_path: Path) -> None:
    def enough(step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        if step == 3:
            raise StopTraining("the loss is low")

    trained = Trained(tmp_path, on_step=enough)
    outcome = await play(trained)
    assert (outcome.steps, outcome.enough, outcome.interrupted) == (3, "on_step: the loss is low", False)
    assert trained.store.models == ["model"]
    assert [step for step, metrics in trained.sink.records if "eval/loss" in metrics] == [0, 2, 3]

    resumed = Trained(tmp_path)
    resumed.run.resume(trained.store.load_training().state)  # type: ignore[union-attr]
    assert (await play(resumed)).steps == STEPS


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (True, "on_step returned True after step 1: return None, or numbers"),
        ({"mine": "high"}, "on_step returned 'high' by the name 'mine' after step 1"),
        ({"train/epoch": 1.0}, "on_step returned train/epoch, which is a metric of the step already, after step 1"),
    ],
)
async def test_what_is_no_metric_ends_the_run_with_its_row(returned: Any, message: str, tmp_path: Path) -> None:
    trained = Trained(tmp_path, on_step=lambda step, metrics, samples: returned)
    with pytest.raises(ForeignError, match=message):
        await play(trained)
    assert [step for step, metrics in trained.sink.records if "train/epoch" in metrics] == [1]


def test_a_function_of_other_arguments_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"on_step cannot be called with the three .*\(too many positional"):
        Trained(tmp_path, on_step=lambda step, metrics: None)


async def test_a_coroutine_function_is_awaited_and_may_evaluate(tmp_path: Path) -> None:
    seen: list[Mapping[str, float]] = []

    async def told(step: int, metrics: Mapping[str, float], samples: Sequence[Any], run: RunAccess) -> Any:
        if step == 3:
            seen.extend([await run.evaluate(), await run.evaluate()])
        return {"mine/step": step}

    trained = Trained(tmp_path, on_step=told)
    await play(trained)
    rows = [metrics["mine/step"] for _, metrics in trained.sink.records if "train/epoch" in metrics]
    assert rows == [1.0, 2.0, 3.0, 4.0, 5.0]
    evaluated = {step: metrics for step, metrics in trained.sink.records if "eval/loss" in metrics}
    assert list(evaluated) == [0, 2, 3, 4, 5], "once a step, beside those of the schedule"
    assert seen == [evaluated[3], evaluated[3]]
    plain = Trained(tmp_path / "plain")
    await play(plain)
    assert torch.equal(plain.table, trained.table), "it changes nothing of the training"


async def test_replies_of_a_run_that_samples_none_are_refused(tmp_path: Path) -> None:
    async def asks(step: int, metrics: Mapping[str, float], samples: Sequence[Any], run: RunAccess) -> None:
        await run.generate(["Hello"])

    trained = Trained(tmp_path, on_step=asks)
    with pytest.raises(ConfigurationError, match="but no engine samples in this run"):
        await play(trained)
    assert trained.store.states["model"]["step"] == 1


def test_a_plain_function_that_takes_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"write async def on_step\(step, metrics, groups, run\)"):
        Trained(tmp_path, on_step=lambda step, metrics, samples, run: None)


@pytest.mark.parametrize("waits", [False, True])
async def test_an_interruption_waits_for_no_function_that_is_awaited(waits: bool, tmp_path: Path) -> None:
    calls: list[int] = []

    def told(step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        calls.append(step)

    async def awaited(step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        calls.append(step)

    trained = Trained(tmp_path, on_step=awaited if waits else told)
    taken = trained.run._steps.step

    async def interrupted(done: int) -> Any:
        return evolve(await taken(done), ended_by=asyncio.CancelledError() if done == 1 else None)

    trained.run._steps.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(ForeignError, match="cancelled though nobody asked"):
        await play(trained)
    assert calls == ([1] if waits else [1, 2])
    assert [step for step, metrics in trained.sink.records if "train/epoch" in metrics] == [1, 2]


async def test_an_error_of_the_caller_ends_the_run_with_what_was_trained(tmp_path: Path) -> None:
    def stop(step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        if step == 2:
            raise ValueError("that is enough")

    trained = Trained(tmp_path, on_step=stop)
    trained.run._sink = tracker = FakeRunTracker()
    with pytest.raises(ForeignError, match="on_step failed after step 2: ValueError: that is enough"):
        await play(trained)
    assert trained.store.models == ["model"]
    assert trained.store.states["model"]["step"] == 2
    assert str(tracker.failure).startswith(
        "ForeignError: on_step failed after step 2: ValueError: that is enough (test_"
    )


async def test_a_tracker_that_fails_does_not_keep_the_training_from_being_saved(tmp_path: Path) -> None:
    class Broken(FakeRunTracker):
        def fail(self, reason: str) -> None:
            raise OSError("no route")

    def stop(step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        raise ValueError("that is enough")

    trained = Trained(tmp_path, on_step=stop)
    trained.run._sink = Broken()
    with pytest.raises(ForeignError, match="that is enough"):
        await play(trained)
    assert trained.store.states["model"]["step"] == 1


async def test_a_run_whose_model_cannot_be_saved_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(tmp_path)
    trained.run._sink = tracker = FakeRunTracker()

    def full(*given: Any) -> Path:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(trained.store, "save_model", full)
    with pytest.raises(CheckpointError):
        await play(trained)
    assert tracker.failure == "CheckpointError: No space left on device"


async def test_the_last_step_has_what_is_left(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    source = trained.run._steps
    assert isinstance(source, Epochs)
    source._total = TOTAL - 1
    await play(trained)
    assert [len(rows) for rows in trained.trained] == [2, 2, 2, 2, 1]


async def test_more_epochs_after_the_last_of_a_run_have_every_example(tmp_path: Path) -> None:
    first = Trained(tmp_path / "first", steps=3, total=PAIRS)
    await play(first)
    assert [len(rows) for rows in first.trained] == [2, 2, 1]
    second = Trained(tmp_path / "second", steps=6)
    second.run.resume(copy.deepcopy(first.store.training))
    await play(second)
    assert [len(rows) for rows in second.trained] == [2, 2, 1]
    assert sorted(row for rows in second.trained for row in rows) == list(range(PAIRS))


async def test_a_run_that_has_all_its_steps_says_so_when_it_is_to_continue(tmp_path: Path) -> None:
    first = Trained(tmp_path / "first", steps=3)
    await play(first)
    for steps in (2, 3, 4):
        second = Trained(tmp_path / str(steps), steps=steps)
        second.run.resume(copy.deepcopy(first.store.training))
        with capture_logs() as logs:
            outcome = await play(second)
        said = [log["event"] for log in logs if "nothing is left to train" in log["event"]]
        assert (outcome.steps, len(said)) == ((4, 0) if steps == 4 else (3, 1))
        assert all(f"has taken 3 steps, and is set to {steps}" in sentence for sentence in said)


@pytest.mark.parametrize("stops_in", [1, 4])
async def test_an_interruption_ends_an_evaluation_after_a_micro_batch(tmp_path: Path, stops_in: int) -> None:
    """The first evaluation, and the last, have two micro-batches each."""

    class Interrupting(FakePolicy):
        def score(self, batch: PackedBatch) -> Any:
            if len(self.scored) == 2 * stops_in - 2:
                heard = threading.Event()
                loop.call_soon_threadsafe(lambda: (task.cancel(), heard.set()))
                assert heard.wait(60)
            return super().score(batch)

    trained = Trained(tmp_path, Interrupting(), max_tokens=6)

    loop: Any = None
    task: Any = None
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(trained.run.run())
    outcome = await task
    assert outcome.interrupted
    assert outcome.steps == (0 if stops_in == 1 else STEPS)
    assert len(trained.policy.scored) == 2 * stops_in - 1, "the second micro-batch is not computed"
    assert "model" in trained.store.models
    assert trained.store.training is not None


@pytest.mark.parametrize("stops_after", [1, 3])
async def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, stops_after: int) -> None:
    whole = Trained(tmp_path / "whole")
    await play(whole)

    class Interrupting(FakePolicy):
        def update(self, micro_batches: Sequence[PackedBatch], objective: PolicyObjective) -> dict[str, float]:
            metrics = super().update(micro_batches, objective)
            if len(self.updates) == stops_after:
                loop.call_soon_threadsafe(task.cancel)
            return metrics

    told: list[int] = []
    first = Trained(tmp_path / "first", Interrupting(), on_step=lambda step, *_: told.append(step))

    loop: Any = None
    task: Any = None
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(first.run.run())
    outcome = await task
    assert (outcome.interrupted, outcome.steps) == (True, stops_after)
    assert told == list(range(1, stops_after + 1)), "the caller hears of every step that counts"
    assert first.store.training is not None
    second = Trained(tmp_path / "second")
    second.run.resume(copy.deepcopy(first.store.training))
    assert (await play(second)).steps == STEPS
    assert first.trained + second.trained == whole.trained
    assert torch.equal(second.table, whole.table)


async def test_an_interruption_does_not_wait_for_rows(tmp_path: Path) -> None:
    """A stream may wait for a hub as long as it likes."""

    class Waiting(ExampleStream[Preference]):
        def at(self, position: int) -> Preference:
            loop.call_soon_threadsafe(task.cancel)
            arrived.wait(5)
            return EXAMPLES[position]

    trained, arrived = Trained(tmp_path), threading.Event()
    source = trained.run._steps
    assert isinstance(source, Epochs)
    source._examples = Waiting()

    async def interrupted() -> RunOutcome:
        nonlocal loop, task
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(trained.run.run())
        try:
            return await task
        finally:
            arrived.set()

    loop: Any = None
    task: Any = None
    outcome = await interrupted()
    assert (outcome.interrupted, outcome.steps) == (True, 0)
    assert trained.trained == []


async def test_a_step_that_fails_leaves_the_place_before_it(tmp_path: Path) -> None:
    class Breaking(FakePolicy):
        def update(self, micro_batches: Sequence[PackedBatch], objective: PolicyObjective) -> dict[str, float]:
            if len(self.updates) == 2:
                raise NonFiniteUpdateError("The loss is nan.")
            return super().update(micro_batches, objective)

    broken = Trained(tmp_path / "broken", Breaking())
    with pytest.raises(NonFiniteUpdateError):
        await play(broken)
    assert broken.store.training is not None
    healed, whole = Trained(tmp_path / "healed"), Trained(tmp_path / "whole")
    healed.run.resume(broken.store.training)
    await play(healed)
    await play(whole)
    assert torch.equal(healed.table, whole.table)


async def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    whole, divided = Trained(tmp_path / "whole"), Trained(tmp_path / "divided", max_tokens=6)
    await play(whole)
    await play(divided)
    assert {len(parts) for parts in whole.policy.updates} == {1}
    assert {len(parts) for parts in divided.policy.updates} == {2}
    torch.testing.assert_close(whole.table, divided.table)
    (_, before), (_, split) = whole.sink.records[0], divided.sink.records[0]
    assert before == pytest.approx(split)


def reward_losses(budget: int) -> tuple[list[float], torch.Tensor]:
    """(losses of five steps of a reward model, its table), in micro-batches of so many tokens."""
    model = FakeValue()
    learner = ExampleLearner(model, pack=pack_preferences, objective=RewardObjective(), max_tokens=budget)
    losses = [learner.learn(EXAMPLES)["train/loss"] for _ in range(5)]
    measured = together([m for part in learner.parts(EXAMPLES) for m in learner.measure_alike([part])])
    assert measured["accuracy"] == pytest.approx(1.0)
    return losses, model.state_dict()["table"]


def test_a_scalar_head_learns_from_pairs_in_the_same_steps() -> None:
    losses, table_V = reward_losses(1000)
    assert losses[0] == pytest.approx(math.log(2))  # both replies of a pair have the reward 0
    assert losses == sorted(losses, reverse=True)
    found, same_V = reward_losses(1)  # a pair is whole in any micro-batch
    assert found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(same_V, table_V)


async def test_a_budget_of_tokens_ends_a_step(tmp_path: Path) -> None:
    """Every example is in one step an epoch; the steps that are counted before are those that are taken."""
    lengths = [3, 1, 8, 2, 2]
    budget = TokenBudget(5, lengths.__getitem__)
    steps = steps_left(PromptCursor(3), PAIRS, total=TOTAL, budget=budget)
    trained = Trained(tmp_path, steps=steps, budget=budget)
    await play(trained)
    drawn = [row for rows in trained.trained for row in rows]
    assert sorted(drawn[:PAIRS]) == sorted(drawn[PAIRS:]) == list(range(PAIRS))
    assert len(trained.trained) == steps
    for rows, after in pairwise(trained.trained):
        assert sum(lengths[row] for row in rows) <= 5 or rows == [2]
        assert sum(lengths[row] for row in [*rows, after[0]]) > 5, "there was room for one more"
    cursor, size = PromptCursor(3), 1000
    many, _ = next_examples(cursor, size, batch_size=0, total=None, budget=TokenBudget(2 * 500, lambda index: 2))
    assert len(many) == 500


async def test_the_model_with_the_best_evaluation_is_kept(tmp_path: Path) -> None:
    trained = Trained(tmp_path, best_metric="eval/loss")
    values = iter([0.0, 3.0, 1.0, 2.0])  # the first is of the model that training begins with

    async def evaluated(step: int) -> dict[str, float]:
        return {"eval/loss": next(values), "eval/accuracy": 1.0}

    assert trained.run._evaluation is not None
    trained.run._evaluation.run = evaluated  # type: ignore[method-assign]
    outcome = await play(trained)
    saved = [name for name in trained.store.models if name == "best"]
    assert len(saved) == 2
    assert outcome.best is not None
    assert (outcome.best.step, outcome.best.metrics) == (4, {"eval/loss": 1.0, "eval/accuracy": 1.0})
    assert trained.run.training_state()["best"] == {
        "metric": "eval/loss",
        "sought": "lowest",
        "measured": {},
        "step": 4,
        "value": 1.0,
        "waited": 1,
        "metrics": {"eval/loss": 1.0, "eval/accuracy": 1.0},
    }
    again = Trained(tmp_path / "again", best_metric="eval/loss")
    again.run.resume(trained.run.training_state())
    assert again.run.best == trained.run.best
    other = Trained(tmp_path / "other", best_metric="eval/accuracy")
    other.run.resume(trained.run.training_state())
    assert (other.run.best.step, other.run.best.left["step"]) == (0, 4), "of another metric nothing is known"


async def test_a_run_ends_when_evaluations_do_not_get_better_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    values = [0.0, 1.0, 2.0, 3.0]  # after steps 0, 2, 4 and 5

    def trained(name: str, patience: int) -> Trained:
        made = Trained(tmp_path / name, best_metric="eval/loss", patience=patience)

        async def evaluated(step: int) -> dict[str, float]:
            return {"eval/loss": values[(step + 1) // 2]}

        assert made.run._evaluation is not None
        made.run._evaluation.run = evaluated  # type: ignore[method-assign]
        return made

    first = trained("first", patience=1)
    outcome = await play(first)
    assert (outcome.steps, outcome.after, outcome.interrupted) == (4, {"eval/loss": 2.0}, False)
    assert outcome.enough == "eval/loss was no better in 1 evaluation than the 1 after step 2"
    assert first.store.models[-1] == "model"
    again, more = trained("again", patience=1), trained("more", patience=2)
    for run in (again, more):
        run.run.resume(first.run.training_state())
    assert (await play(again)).steps == 4, "it had ended"
    assert again.trained == []
    ended = await play(more)
    assert (ended.steps, ended.enough) == (STEPS, None)
    assert [*first.trained, *more.trained] == (await whole(tmp_path / "whole")).trained


async def test_evaluations_that_are_no_numbers_end_a_run_too(tmp_path: Path) -> None:
    trained = Trained(tmp_path, best_metric="eval/loss", patience=2)

    async def evaluated(step: int) -> dict[str, float]:
        return {"eval/loss": math.nan}

    assert trained.run._evaluation is not None
    trained.run._evaluation.run = evaluated  # type: ignore[method-assign]
    outcome = await play(trained)
    assert (outcome.steps, outcome.enough) == (4, "eval/loss was no number in 2 evaluations")
    assert outcome.best is None
    assert "best" not in trained.store.models


async def whole(path: Path) -> Trained:
    """A run that trains to the end of its schedule."""
    trained = Trained(path)
    await play(trained)
    return trained


async def test_an_unknown_metric_of_the_best_model_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    trained = Trained(tmp_path, best_metric="eval/reward")
    with pytest.raises(ConfigurationError, match=r"best_metric is eval/reward, but evaluations give eval/accuracy, "):
        await play(trained)
    assert trained.trained == []
