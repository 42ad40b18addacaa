"""Scores that a frozen model gives to all examples: computed once, before training, and kept.

Invariant: a key stands for one model and one list of examples, so that what is kept under it never differs from what
would be computed. A pass that was interrupted goes on where it stopped.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog
from torch import Tensor

from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)

CHUNK = 128
"""Examples that are scored, and kept, together."""

Example = TypeVar("Example")
Model = TypeVar("Model")


class ScoredExamples(ExampleSource[Example], Generic[Example]):
    """`examples`, each as `attach` returns it with its `scores`."""

    def __init__(
        self,
        examples: ExampleSource[Example],
        scores: Sequence[Tensor],
        attach: Callable[[Example, Tensor], Example],
    ) -> None:
        self._examples = examples
        self.scores = scores
        self._attach = attach

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._attach(self._examples[index], self.scores[index])


def kept_scores(
    examples: ExampleSource[Example],
    make_model: Callable[[], Model],
    score: Callable[[Model, list[Example]], Sequence[Tensor]],
    store: ScoreStore,
    *,
    key: str,
    name: str,
) -> list[Tensor]:
    """Returns the scores of each example, in their order.

    Args:
        examples: all of them are scored.
        make_model: loads the model; not called if all scores are kept.
        score: returns the scores of some examples under the model.
        store: where they are kept.
        key: key of the model and the examples.
        name: says in the log what is computed, such as "the reference's log-probs of data.dataset".
    """
    scores = store.load(key)[: len(examples)]
    if len(scores) < len(examples):
        log.info(f"computing {name}", examples=len(examples), kept=len(scores))
        model = make_model()
        for first in range(len(scores), len(examples), CHUNK):
            chunk = [examples[index] for index in range(first, min(first + CHUNK, len(examples)))]
            scores.extend(store.append(key, first, score(model, chunk)))
    return scores
