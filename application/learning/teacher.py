"""A teacher's predictions of the trained tokens of examples: computed once, before training, and kept.

Kept are, for each token, the k ids as int32 and k + 1 log-probs as float16: 386 bytes with k = 64.
Invariant: a key stands for one teacher, its settings and one list of examples. A pass that was interrupted goes on
where it stopped.
"""

from collections.abc import Callable, Sequence

import structlog
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.reference import CHUNK
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import Predictions, TeacherModel
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)


class TaughtExamples(ExampleSource[Demonstration]):
    """`examples`, each with the teacher's predictions, as `packed_predictions` packs them."""

    def __init__(self, examples: ExampleSource[Demonstration], kept: Sequence[Tensor]) -> None:
        self._examples = examples
        self._kept = kept

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Demonstration:
        found = unpacked_predictions(self._kept[index])
        return evolve(self._examples[index], teacher_ids_AK=found.ids_AK, teacher_logprobs_AB=found.logprobs_AB)


def packed_predictions(predictions: Predictions) -> Tensor:
    """Returns predictions as one int16 tensor [A, 3 K + 1]: the ids' two halves, then the log-probs' bits."""
    ids_AK, logprobs_AB = predictions.ids_AK.contiguous(), predictions.logprobs_AB.contiguous()
    return torch.cat([ids_AK.view(torch.int16), logprobs_AB.view(torch.int16)], dim=1)


def unpacked_predictions(packed: Tensor) -> Predictions:
    """Returns what `packed_predictions` packed."""
    k = (packed.shape[1] - 1) // 3
    ids, logprobs = (part.contiguous() for part in packed.split_with_sizes([2 * k, k + 1], dim=1))
    return Predictions(ids_AK=ids.view(torch.int32), logprobs_AB=logprobs.view(torch.float16))


def with_teacher(
    examples: ExampleSource[Demonstration],
    make_teacher: Callable[[], TeacherModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    name: str = "the examples",
) -> TaughtExamples:
    """Returns the examples with a teacher's predictions.

    Args:
        examples: all of them are predicted, in their order.
        make_teacher: loads the teacher; not called if all predictions are kept.
        store: where they are kept.
        key: of the teacher and the examples.
        max_tokens: token budget of one forward pass.
        name: says in the log which examples they are.
    """
    kept = store.load(key)[: len(examples)]
    if len(kept) < len(examples):
        log.info(f"computing the teacher's predictions of {name}", examples=len(examples), kept=len(kept))
        teacher = make_teacher()
        for first in range(len(kept), len(examples), CHUNK):
            chunk = [examples[index] for index in range(first, min(first + CHUNK, len(examples)))]
            batch = pack_demonstrations([evolve(example, weight=1.0) for example in chunk])
            rows = torch.cat([packed_predictions(teacher.predict(part)) for part in split(batch, max_tokens)])
            sizes = [sum(branch.trained_length for branch in example.branches) for example in chunk]
            found: tuple[Tensor, ...] = rows.split_with_sizes(sizes)
            kept.extend(store.append(key, first, found))
    return TaughtExamples(examples, kept)
