"""Steps of offline trainers: each takes the next examples of an epoch in its seeded order, and learns from them; and
their evaluation."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic

from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.learning.examples import Example, ExampleLearner, together
from rollgrad.application.learning.rewards import RewardLearner
from rollgrad.application.pipelines.step_source import Evaluation, StepReport, StepSource, finished, uninterrupted
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.example_source import ExampleSource, ExampleStream

LOOKED_AT = 64
"""Examples whose lengths are looked at together, to find those of a step."""


@frozen
class TokenBudget:
    """Tokens of a step, at most, and the length of the example with an index. An example that alone has more is a step
    of its own."""

    tokens: int
    length: Callable[[int], int]


def next_examples(
    cursor: PromptCursor, size: int, *, batch_size: int, total: int | None, budget: TokenBudget | None = None
) -> tuple[list[int], PromptCursor]:
    """Returns the indices of the next step's examples of `size`, and the place after them; `total` ends a run, and a
    `budget` takes the place of `batch_size`."""
    # Counted from the place in the examples: a run that goes on for more epochs had a smaller step before.
    left = None if total is None else total - cursor.taken(size)
    if budget is None:
        return cursor.take(batch_size if left is None else min(batch_size, left), size)
    looked_at = LOOKED_AT
    while True:
        indices, after = cursor.take(looked_at if left is None else min(looked_at, left), size)
        fit = max(1, bisect_right(list(accumulate(map(budget.length, indices))), budget.tokens))
        if fit < len(indices):
            return cursor.take(fit, size)
        if len(indices) == left:
            return indices, after
        looked_at *= 2


def steps_left(cursor: PromptCursor, size: int, *, total: int, budget: TokenBudget) -> int:
    """Returns how many steps take what is left of a run of `total` examples."""
    steps = 0
    while cursor.taken(size) < total:
        _, cursor = next_examples(cursor, size, batch_size=0, total=total, budget=budget)
        steps += 1
    return steps


def coming_steps(
    cursor: PromptCursor, size: int, *, steps: int, batch_size: int, total: int | None
) -> Iterator[list[int]]:
    """Yields the indices of the examples of each of the next `steps` steps, as `Epochs` takes them."""
    for _ in range(steps):
        indices, cursor = next_examples(cursor, size, batch_size=batch_size, total=total)
        yield indices


class Epochs(StepSource[Example], Generic[Example]):
    """A `StepSource` over examples. A step that reaches the end of an epoch continues in the next; the last step of the
    run has the remaining examples.

    Args:
        learner: learns from them.
        examples: in an order of their own in each epoch; of a stream in its own order, without those of rows that
            cannot be used.
        batch_size: examples of a step.
        total: examples of the whole run; None ends no step early.
        budget: budget of a step, in place of `batch_size`.
        seed: gives the order of each epoch.
        clock: measures.
    """

    def __init__(
        self,
        learner: ExampleLearner[Example],
        examples: ExampleSource[Example] | ExampleStream[Example],
        *,
        batch_size: int,
        total: int | None,
        seed: int,
        clock: Clock,
        budget: TokenBudget | None = None,
    ) -> None:
        self._budget = budget
        self._learner = learner
        self._examples = examples
        self._batch_size = batch_size
        self._total = total
        self._clock = clock
        self._cursor = PromptCursor(seed)

    async def start(self, done: int) -> None:
        """Does nothing: there is no engine to prepare."""

    async def step(self, done: int) -> StepReport[Example]:
        """Takes the optimizer step after `done` ones."""
        started = self._clock.monotonic()
        # In threads, so that signals reach the run while rows are read, from a hub perhaps, and a step is computed.
        examples, cursor = await asyncio.to_thread(self._next, done)
        metrics, cancelled = await uninterrupted(asyncio.to_thread(self._learner.learn, examples))
        self._cursor = cursor
        seconds = self._clock.monotonic() - started
        metrics |= {
            **self._place(cursor, len(examples)),
            "time/step_s": seconds,
            "time/tokens_per_s": metrics["train/tokens"] / max(seconds, 1e-9),
        }
        return StepReport(metrics=metrics, ended_by=asyncio.CancelledError() if cancelled else None)

    def _next(self, done: int) -> tuple[list[Example], PromptCursor]:
        """Returns the examples of the step after `done` ones, and the place after them.

        Raises:
            DataError: none of the rows that a stream has for it can be used.
        """
        source = self._examples
        if isinstance(source, ExampleStream):
            rows = range(self._cursor.index, self._cursor.index + self._batch_size)
            found = [example for row in rows if (example := source.at(row)) is not None]
            if not found:
                raise DataError(
                    f"None of the {len(rows)} rows of step {done + 1} can be used: the warnings say why; mend the "
                    "rows, or raise --train.batch_size."
                )
            return found, evolve(self._cursor, index=rows.stop)
        indices, cursor = next_examples(
            self._cursor, len(source), batch_size=self._batch_size, total=self._total, budget=self._budget
        )
        return [source[index] for index in indices], cursor

    def _place(self, cursor: PromptCursor, learned: int) -> dict[str, float]:
        """Returns the place in the data as a metric: of a stream in rows, with how many of the step's could not be
        used, else in epochs."""
        if isinstance(self._examples, ExampleStream):
            return {"train/rows": float(cursor.index), "train/dropped_rows": float(self._batch_size - learned)}
        return {"train/epoch": cursor.epoch + cursor.index / len(self._examples)}

    async def stop(self) -> None:
        """Does nothing: between two steps nothing is in flight."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the examples."""
        return self._cursor.state_dict()

    def kept_samples(self) -> list[dict[str, Any]]:
        """Returns an empty list, because the position in the examples is enough to continue."""
        return []

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from `state`."""
        self._cursor = PromptCursor.from_state_dict(dict(state))


class ExampleEvaluation(Evaluation, Generic[Example]):
    """Measures the model on held-out examples. An interruption ends it after the micro-batch that is being computed.

    Args:
        learner: measures them.
        examples: all are measured, as one batch.
        name_of: returns the name of the dataset that an example is of; None where there is one.
    """

    def __init__(
        self,
        learner: ExampleLearner[Example],
        examples: ExampleSource[Example],
        name_of: Callable[[Example], str] | None = None,
    ) -> None:
        self._learner = learner
        self._examples = examples
        self._name_of = name_of

    async def run(self, step: int | None = None) -> dict[str, float]:
        """Returns the loss and the objective's metrics, as `eval/name`, and where there are several datasets those of
        each as `eval/SET/name`; `step` makes no difference."""
        examples = [self._examples[index] for index in range(len(self._examples))]
        objective = await finished(asyncio.to_thread(self._learner.objective_for, examples))
        sets = self._sets(examples)
        portions = await finished(asyncio.to_thread(self._portions, examples, list(sets.values())))
        measured: list[Mapping[str, Tensor | float]] = []
        alone: dict[str, list[Mapping[str, Tensor | float]]] = {name: [] for name in sets}
        for name, portion in zip(sets, portions, strict=True):
            for alike in portion:
                # In a thread, so that signals reach the run while a micro-batch is computed.
                found = await finished(asyncio.to_thread(self._learner.measure_alike, alike, objective))
                measured.append(found[0])
                alone[name] += found[1:]
        metrics = {f"eval/{name}": value for name, value in together(measured).items()}
        for set_name, parts in alone.items():
            metrics |= {f"eval/{set_name}/{name}": value for name, value in together(parts).items()}
        return metrics

    def _portions(
        self, examples: Sequence[Example], sets: Sequence[Sequence[Example]]
    ) -> Sequence[Sequence[Sequence[ExampleBatch]]]:
        """Returns the micro-batches of each set, each as often as it is measured."""
        if len(sets) > 1:
            return self._learner.portions(sets)
        return [[[part] for part in self._learner.parts(examples)]]

    def _sets(self, examples: Sequence[Example]) -> dict[str, list[Example]]:
        """Returns the examples of each dataset, by name."""
        sets: dict[str, list[Example]] = {}
        for example in examples:
            sets.setdefault("" if self._name_of is None else self._name_of(example), []).append(example)
        return sets


class RewardEvaluation(ExampleEvaluation[Preference]):
    """Measures a reward model on held-out pairs, and tells its learner the mean and the spread of their scores."""

    def __init__(
        self,
        learner: RewardLearner,
        examples: ExampleSource[Preference],
        name_of: Callable[[Preference], str] | None = None,
    ) -> None:
        super().__init__(learner, examples, name_of)
        self._reward_learner = learner

    async def run(self, step: int | None = None) -> dict[str, float]:
        """Returns the loss and the objective's metrics, as `eval/name`; `step` makes no difference."""
        metrics = await super().run(step)
        self._reward_learner.note(metrics["eval/score_mean"], metrics["eval/score_std"])
        return metrics
