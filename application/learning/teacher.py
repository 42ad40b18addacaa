"""A teacher's predictions of the trained tokens of examples, kept as `scores` describes.

Kept are, for each token, the k ids as int32 and k + 1 log-probs as float16: 386 bytes with k = 64.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.scores import ScoredExamples, kept_scores
from rollgrad.domain.batches.examples import DemonstrationBatch, pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import Predictions, TeacherModel
from rollgrad.domain.ports.score_store import ScoreStore

Datasources = Mapping[int, str]
"""Datasource of each example, by its `row`, in the order of examples."""


def packed_predictions(predictions: Predictions) -> Tensor:
    """Returns predictions as one int16 tensor [A, 3 K + 1]: the ids' two halves, then the log-probs' bits."""
    ids_AK, logprobs_AB = predictions.ids_AK.contiguous(), predictions.logprobs_AB.contiguous()
    return torch.cat([ids_AK.view(torch.int16), logprobs_AB.view(torch.int16)], dim=1)


def unpacked_predictions(packed: Tensor) -> Predictions:
    """Returns what `packed_predictions` packed."""
    k = (packed.shape[1] - 1) // 3
    ids, logprobs = (part.contiguous() for part in packed.split_with_sizes([2 * k, k + 1], dim=1))
    return Predictions(ids_AK=ids.view(torch.int32), logprobs_AB=logprobs.view(torch.float16))


def asked(examples: Sequence[Demonstration], datasources: Datasources | None) -> DemonstrationBatch:
    """Returns the batch of examples that a teacher is asked about; `datasources` as in `with_teacher`."""
    batch = pack_demonstrations([evolve(example, weight=1.0) for example in examples])
    if datasources is None:
        return batch
    return evolve(batch, datasources_S=tuple(datasources[examples[place].row] for place in batch.group_ids_S.tolist()))


def with_teacher(
    examples: ExampleSource[Demonstration],
    make_teacher: Callable[[], TeacherModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    name: str = "the examples",
    datasources: Datasources | None = None,
) -> ScoredExamples[Demonstration]:
    """Returns the examples with a teacher's predictions.

    Args:
        examples: all of them are predicted, in their order.
        make_teacher: loads the teacher; not called if all predictions are kept.
        store: where they are kept.
        key: key of the teacher, its settings and the examples.
        max_tokens: token budget of one forward pass.
        name: says in the log which examples they are.
        datasources: datasources of the examples, by which a teacher is found; None where there is one teacher.
    """

    def predict(teacher: TeacherModel, chunk: list[Demonstration]) -> Sequence[Tensor]:
        batch = asked(chunk, datasources)
        rows = torch.cat([packed_predictions(teacher.predict(part)) for part in split(batch, max_tokens)])
        sizes = [sum(branch.trained_length for branch in example.branches) for example in chunk]
        found: tuple[Tensor, ...] = rows.split_with_sizes(sizes)
        return found

    name = f"the teacher's predictions of {name}"
    kept = kept_scores(examples, make_teacher, predict, store, key=key, name=name)
    return ScoredExamples(examples, kept, _with_predictions)


def _with_predictions(example: Demonstration, packed: Tensor) -> Demonstration:
    found = unpacked_predictions(packed)
    return evolve(example, teacher_ids_AK=found.ids_AK, teacher_logprobs_AB=found.logprobs_AB)
