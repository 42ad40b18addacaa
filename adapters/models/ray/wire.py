"""Batches on their way to the processes of a group, and results on their way back: a few bytes a token.

Columns travel as numpy arrays, which Ray hands over without a copy. What is constant over stretches of tokens (masks,
turns, versions, weights, advantages of whole replies) travels as stretches, floats at action tokens alone, token ids in
32 bits; equal columns travel once, as does each image, without its file.
Invariant: at every token that a result depends on, a batch arrives as it was; floats outside actions arrive as 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields, frozen
from numpy.typing import NDArray
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.batches.sharding import least, weightless
from rollgrad.domain.episodes.images import Image, PlacedImage, PlacedImages
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.ports.models import LossOutput, PolicyObjective, TokenScores

Array = NDArray[Any]

FEW = 16
"""Tokens of a stretch, on average, from which a column travels as stretches."""

SCORE, SCORES, LOGPROBS, VALUES, PREDICT = "score", "scores", "logprobs", "values", "predict"
"""Calls whose results are columns: all of `TokenScores`, those of `PolicyModel.scores`, log-probs alone, values,
predictions."""

SMALL = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.float16)
"""Types of results that travel as they are."""

EXPERTS = "experts_NLK"
"""Column of results with an entry for each token, not for action tokens alone."""

NAMES = {SCORES: ("logprobs_N", "entropy_N", "collision_N", EXPERTS), LOGPROBS: ("logprobs_N",)}
"""Columns of scores that return from calls of fewer than all."""

PREDICTED = ("teacher_ids_NK", "teacher_logprobs_NK")
"""Columns of predictions, as a batch has them."""

OF_ACTIONS = ("sampler_ids_NK", "sampler_logprobs_NK", *PREDICTED)
"""Columns that mean something at action tokens alone, besides those of floats."""

ONLY_HERE = "places_S"
"""Column that does not travel: it means something in the process of the whole batch alone."""


@frozen
class Stretches:
    """A column whose value changes at the tokens `starts` only, the first of which is 0."""

    starts: Array
    values: Array

    def column(self, count: int) -> Array:
        """Returns the whole column, of `count` tokens."""
        return self.values.repeat(np.diff(self.starts, append=count))


@frozen
class AtActions:
    """A column that is 0 but at action tokens; `source` is the column that has its values."""

    source: str


@frozen
class SentImages:
    """Images of a batch: `tensors` of each, by its digest; `places`, for each sequence, has the digest, the first token
    and the one after the last of each of its images."""

    tensors: dict[str, dict[str, Array]]
    places: list[list[tuple[str, int, int]]]

    def placed(self) -> tuple[PlacedImages, ...]:
        """Returns the images of each sequence."""
        images = {digest: Image(digest=digest, data=b"", tensors=_tensors(own)) for digest, own in self.tensors.items()}
        return tuple(
            tuple(PlacedImage(image=images[digest], start=start, stop=stop) for digest, start, stop in own)
            for own in self.places
        )


@frozen
class SentBatch:
    """Passes of one process: `counts` sequences of its own each, then `fillers` others, which get the weight 0.
    `columns` by name; `actions` are values at action tokens, by the name of the first column that has them."""

    kind: type[PackedBatch]
    counts: list[int]
    fillers: list[int]
    columns: dict[str, Any]
    actions: dict[str, Array]
    images: SentImages
    others: dict[str, Any]

    def passes(self) -> list[PackedBatch]:
        """Returns the batches, in order."""
        batch, ends = self._batch(), np.cumsum(np.add(self.counts, self.fillers)).tolist()
        found = []
        for count, more, end in zip(self.counts, self.fillers, ends, strict=True):
            part = batch.select(range(end - count - more, end))
            found.append(weightless(part, torch.arange(count + more) >= count) if more else part)
        return found

    def own(self, results: Sequence[Tensor], *, whole: bool = False) -> Array:
        """Returns the results of `passes` for its own action tokens, or for the `whole` of its own tokens, float32
        unless they take less and have a numpy type; fillers come after these in each."""
        lengths = self.columns["lengths_S"]
        mask = self.columns["action_mask_N"].column(int(lengths.sum()))
        actions_S = lengths if whole else np.add.reduceat(mask.astype(np.int64), np.cumsum(lengths) - lengths)
        ends = np.cumsum(np.add(self.counts, self.fillers)) - self.fillers
        own = [int(actions_S[end - count : end].sum()) for count, end in zip(self.counts, ends, strict=True)]
        joined = torch.cat([result[:count] for result, count in zip(results, own, strict=True)])
        return (joined if joined.dtype in SMALL else joined.float()).numpy()

    def _batch(self) -> PackedBatch:
        lengths = self.columns["lengths_S"]
        total = int(lengths.sum())
        mask = self.columns["action_mask_N"].column(total)
        read: dict[str, Any] = {}
        for name, column in self.columns.items():
            if isinstance(column, AtActions):
                values = self.actions[column.source]
                whole = np.zeros((total, *values.shape[1:]), values.dtype)
                whole[mask] = values
            elif isinstance(column, Stretches):
                whole = column.column(total)
            else:
                whole = np.array(column)  # a copy: what Ray hands over cannot be written to
            read[name] = torch.from_numpy(whole)
        read["tokens_N"] = read["tokens_N"].long()
        return self.kind(**read, **self.others, images_S=self.images.placed())


@frozen
class SentReplies:
    """Replies on their way to a reward model, which goes through them once: the images of `replies` have no tensors,
    which are in `tensors` once for all, by the digest of their image."""

    replies: list[RewardInput]
    tensors: dict[str, dict[str, Array]]

    @classmethod
    def of(cls, replies: Sequence[RewardInput]) -> "SentReplies":
        """Returns `replies` as they travel."""
        images = {placed.image.digest: placed.image for reply in replies for placed in reply.images}
        bare = {digest: evolve(image, tensors={}) for digest, image in images.items()}
        return cls([_with(reply, bare) for reply in replies], _arrays(images))

    def __iter__(self) -> Iterator[RewardInput]:
        images = {placed.image.digest: placed.image for reply in self.replies for placed in reply.images}
        whole = {digest: evolve(image, tensors=_tensors(self.tensors[digest])) for digest, image in images.items()}
        return (_with(reply, whole) for reply in self.replies)


def _with(reply: RewardInput, images: Mapping[str, Image]) -> RewardInput:
    """Returns a reply with other images, by the digests of its own."""
    return evolve(reply, images=tuple(evolve(placed, image=images[placed.image.digest]) for placed in reply.images))


def _arrays(images: Mapping[str, Image]) -> dict[str, dict[str, Array]]:
    return {d: {name: tensor.numpy() for name, tensor in image.tensors.items()} for d, image in images.items()}


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


class _Whole:
    """A batch of which each process gets a part: where its columns change is found once for all parts."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        columns = [column for column in batch.columns() if column[0] != ONLY_HERE]
        self._columns = [(name, axis, column.numpy()) for name, axis, column in columns]
        self._changes = {
            name: _changes(column, always=name == "action_mask_N")
            for name, axis, column in self._columns
            if axis == "N" and column.ndim == 1 and name != "tokens_N"
        }

    def sent(self, sequences: Sequence[int], counts: Sequence[int], fillers: Sequence[int]) -> SentBatch:
        """Returns a process's batch as it travels.

        Args:
            sequences: indices of its sequences, pass by pass.
            counts: number of sequences of each pass.
            fillers: number of fillers of each pass.
        """
        batch = self.batch
        index_S = torch.as_tensor(sequences, dtype=torch.int64)
        runs = batch.runs(index_S)
        mask = _joined(batch.action_mask_N.numpy(), runs)
        columns: dict[str, Any] = {}
        actions: dict[str, Array] = {}
        for name, axis, column in self._columns:
            if axis != "N":
                columns[name] = column[index_S.numpy()]
            elif name == "tokens_N":
                columns[name] = _joined(column, runs, np.int32)
            elif (changes := self._changes.get(name)) is not None:
                columns[name] = _stretches(column, changes, runs)
            elif name in OF_ACTIONS or (column.dtype.kind == "f" and column.ndim == 1):
                columns[name] = _at_actions(name, _joined(column, runs)[mask], actions)
            else:
                columns[name] = _joined(column, runs)
        values = {f.name: getattr(batch, f.name) for f in fields(type(batch)) if f.name != "images_S"}
        plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        plain |= {
            name: tuple(column[sequence] for sequence in sequences) for name, column in batch.rows() if name in plain
        }
        images = _images([batch.images_S[sequence] for sequence in sequences] if batch.images_S else [])
        return SentBatch(type(batch), list(counts), list(fillers), columns, actions, images, plain)


def _images(images_S: Sequence[PlacedImages]) -> SentImages:
    images = {placed.image.digest: placed.image for own in images_S for placed in own}
    return SentImages(
        tensors=_arrays(images),
        places=[[(placed.image.digest, placed.start, placed.stop) for placed in own] for own in images_S],
    )


def _changes(column_N: Array, *, always: bool) -> Array | None:
    """Returns the tokens at which a column has another value than at the one before; None if they are many, unless
    `always`."""
    differs = column_N[1:] != column_N[:-1]
    if not always and FEW * np.count_nonzero(differs) >= len(column_N):
        return None
    return np.flatnonzero(differs) + 1


def _joined(column_N: Array, runs: Sequence[tuple[int, int]], dtype: Any = None) -> Array:
    """Returns the runs of a column end to end."""
    return np.concatenate([column_N[start:stop] for start, stop in runs], dtype=dtype, casting="same_kind")


def _stretches(column_N: Array, changes: Array, runs: Sequence[tuple[int, int]]) -> Stretches:
    """Returns the runs of a column end to end, as stretches; each run begins one."""
    begins, starts, total = list[Array](), list[Array](), 0
    places = np.searchsorted(changes, np.array(runs)).tolist()
    for (start, stop), (first, last) in zip(runs, places, strict=True):
        own = changes[first:last]
        own = own if len(own) and own[0] == start else np.concatenate([[start], own])
        begins.append(own)
        starts.append(own - (start - total))
        total += stop - start
    return Stretches(np.concatenate(starts).astype(np.int32), column_N[np.concatenate(begins)])


def _at_actions(name: str, values_A: Array, actions: dict[str, Array]) -> AtActions:
    """Returns where a column's values at action tokens travel: with another column that has the same, if there is
    one."""
    for known, same_A in actions.items():
        if np.array_equal(values_A, same_A):
            return AtActions(known)
    actions[name] = values_A
    return AtActions(name)


def divided(passes: Passes[Any], parts: int) -> list[SentBatch]:
    """Returns the part of each of `parts` processes. A pass of which a process has no sequence is filled, and
    so is one without images if the batch has any: the layers that images go through, where processes divide them,
    compute in all of them or in none."""
    batch, whole, found = passes.whole, _Whole(passes.whole), []
    filler: list[int] = []
    for part in range(parts):
        own = [plan[part] for plan in passes.plan]
        lacking = [not any(map(batch.images_of, each)) if batch.images_S else not each for each in own]
        if any(lacking) and not filler:
            filler = least(batch).tolist()
        fillers = [filler if lacks else [] for lacks in lacking]
        sequences = [s for each, more in zip(own, fillers, strict=True) for s in (*each, *more)]
        found.append(whole.sent(sequences, [len(each) for each in own], [len(more) for more in fillers]))
    return found


def merged(passes: Passes[Any], results: Sequence[Mapping[str, Array]]) -> dict[str, Tensor]:
    """Returns columns [N] of the whole batch from the values of each part's action tokens, or, of `EXPERTS`, from those
    of all its tokens."""
    whole = passes.whole
    merged_columns = {
        name: np.zeros(
            (whole.token_count, *column.shape[1:]), column.dtype if column.dtype.kind in "iu" else np.float32
        )
        for name, column in results[0].items()
    }
    mask_N = whole.action_mask_N.numpy()
    changes = np.flatnonzero(mask_N[1:] != mask_N[:-1]) + 1
    for part, columns in enumerate(results):
        sequences = torch.tensor([s for plan in passes.plan for s in plan[part]], dtype=torch.int64)
        runs = whole.runs(sequences)
        # Copying stretches of neighbours costs less than indexing their tokens.
        actions = _action_stretches(runs, mask_N, changes)
        for name, values in columns.items():
            taken = 0
            for start, stop in runs if name == EXPERTS else actions:
                merged_columns[name][start:stop] = values[taken : taken + stop - start]
                taken += stop - start
    return {name: torch.from_numpy(column_N) for name, column_N in merged_columns.items()}


def _action_stretches(runs: Sequence[tuple[int, int]], mask_N: Array, changes: Array) -> list[tuple[int, int]]:
    """Returns the stretches of action tokens within runs of tokens, each with its first token and the one after its
    last. `changes` are the places at which the mask of actions differs from the place before."""
    places = np.searchsorted(changes, np.array(runs).reshape(-1, 2)).tolist()
    return [
        (begin, end)
        for (start, stop), (first, last) in zip(runs, places, strict=True)
        for begin, end in pairwise([start, *changes[first:last].tolist(), stop])
        if begin < end and mask_N[begin]
    ]


class Recording:
    """A policy's objective that keeps, in the process that calls it, what it is told of tokens."""

    def __init__(self, objective: PolicyObjective[Any]) -> None:
        self._objective = objective
        self._passes: list[dict[str, Tensor]] = []

    def __call__(self, scores: TokenScores, batch: PackedBatch) -> LossOutput:
        """Returns the objective's share of the loss."""
        output = self._objective(scores, batch)
        columns = {"logprobs_N": scores.logprobs_N, "entropy_N": scores.entropy_N, "clipped_N": output.clipped_N}
        mask_N = batch.action_mask_N
        told = {name: c.detach()[mask_N.to(c.device)] for name, c in columns.items() if c is not None}
        told["entropy_N"] = told["entropy_N"].half()  # it is looked at: three digits are enough, in half the bytes
        self._passes.append(told)
        return output

    def told(self, batches: Sequence[SentBatch]) -> list[dict[str, Array]]:
        """Returns log-probs, entropies and, of an objective with ratios, which tokens were clipped, at the action
        tokens of each of the batches whose passes it was called with, in order."""
        passes = iter(self._passes)
        of_batches = [list(islice(passes, len(batch.counts))) for batch in batches]
        return [
            {name: batch.own([columns[name].cpu() for columns in own]) for name in own[0]}
            for batch, own in zip(batches, of_batches, strict=True)
        ]


def called(model: Any, method: str, arguments: Sequence[Any]) -> Any:
    """Calls a method of a model in its process. With a list of `SentBatch`, `update` gets all their passes, and others
    one after the other; the columns of their results return at action tokens alone, by name. With a `Recording` as
    objective, `update` returns its metrics and such columns of each `SentBatch`."""
    batches = arguments[0] if arguments else None
    if not (isinstance(batches, list) and batches and isinstance(batches[0], SentBatch)):
        return getattr(model, method)(*arguments)
    if method == "update":
        metrics = model.update([part for batch in batches for part in batch.passes()], *arguments[1:])
        return (metrics, arguments[1].told(batches)) if isinstance(arguments[1], Recording) else metrics
    (batch,) = batches
    found: dict[str, list[Tensor]] = {}
    for part in batch.passes():
        if method == PREDICT:  # they are of action tokens already
            predictions = model.predict(part, *arguments[1:])
            columns = zip(PREDICTED, (predictions.ids_AK, predictions.logprobs_AB), strict=True)
            for name, column in columns:
                found.setdefault(name, []).append(column)
            continue
        for name, column_N in _columns(model, method, part):
            column_N = column_N.cpu()
            found.setdefault(name, []).append(column_N if name == EXPERTS else column_N[part.action_mask_N])
    return {name: batch.own(columns, whole=name == EXPERTS) for name, columns in found.items()}


def _columns(model: Any, method: str, batch: PackedBatch) -> Iterator[tuple[str, Tensor]]:
    if method == VALUES:
        yield VALUES, model.values(batch)
        return
    scores: TokenScores = model.score(batch)
    names = NAMES.get(method) or [attribute.name for attribute in fields(type(scores))]
    for name in names:
        if isinstance(column_N := getattr(scores, name), Tensor):
            yield name, column_N
