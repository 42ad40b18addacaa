"""Prepared data as examples by index: demonstrations, preference pairs, labelled replies, and labelled steps.

Does not own: how rows become tokens, and where they are kept (`preparation`).
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from attrs import field, frozen

from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.domain.episodes.examples import Demonstration, Label, Preference, StepLabels, WeightedTokens, prompt_key
from rollgrad.domain.episodes.images import PlacedImages

PARTS, PRIME = 8, 1_000_003
"""Tokens of an example by which it may be told from others, and the factor between them, as in a polynomial hash."""


@frozen(eq=False)
class PreparedExamples:
    """The examples of a dataset as arrays.

    An example has one branch or several, each with its tokens. Those of all branches lie end to end.
    """

    tokens: Any
    """Int32, of all branches."""
    weights: Any
    """Float32: weight of each token in the loss."""
    lengths: Any
    """Int64: tokens of each branch."""
    prompt_lengths: Any
    """Int64: tokens of the prompt of each branch."""
    branch_counts: Any
    """Int64: branches of each example."""
    rows: Any
    """Place of each example in the data."""
    row_weights: Any
    """Float32: weight of each example."""
    margins: Any
    """Float32: margin of each example."""
    labels: Any
    """Bool: whether each branch is a good reply (the chosen one of a pair); false for all where rows have no labels."""
    report: DataReport
    fingerprint: str
    """Digest of the tokens."""
    origin: str
    """Fingerprint of the rows, the template and the settings, whatever the day."""
    written_on: str | None = None
    """The date that the template wrote, if it writes one."""
    read_again: Callable[[int], Sequence[PlacedImages]] | None = None
    """Returns the images of each branch of a row, which are read when they are needed; None where rows have none."""
    names: Sequence[str] = field(default=(), repr=False)
    """Name of the dataset that each row of the data is of, whether it became an example or not; empty where there is
    one dataset."""
    datasources: Callable[[], Sequence[str]] = field(default=tuple, repr=False)
    """Returns the datasource of each row of the data, whether it became an example or not; nothing where it is not
    known."""

    def __len__(self) -> int:
        return len(self.branch_counts)

    def __getitem__(self, index: int) -> Demonstration:
        branches = []
        first = int(self._firsts[index])
        images = None if self.read_again is None else self.read_again(int(self.rows[index]))
        for branch in range(first, first + int(self.branch_counts[index])):
            start = int(self._starts[branch])
            stop = start + int(self.lengths[branch])
            branches.append(
                WeightedTokens(
                    token_ids_T=torch.from_numpy(self.tokens[start:stop].astype(numpy.int64)),
                    weights_T=torch.from_numpy(numpy.array(self.weights[start:stop])),
                    prompt_length=int(self.prompt_lengths[branch]),
                    images=() if images is None else images[branch - first],
                )
            )
        return Demonstration(branches=tuple(branches), row=int(self.rows[index]), weight=float(self.row_weights[index]))

    def length(self, index: int) -> int:
        """Returns the number of tokens of an example, all branches together."""
        return int(self._totals[index])

    def repeated_in(self, others: "PreparedExamples") -> list[int]:
        """Returns the indices of the examples that `others` have too, token for token. Images are not compared: of
        data with images none counts."""
        if not len(others) or self.read_again is not None or others.read_again is not None:
            return []
        likely = numpy.flatnonzero(numpy.isin(others._marks(), self._marks()))
        known = {others._content(index) for index in likely.tolist()}
        return [index for index in range(len(self)) if self._content(index) in known]

    def _marks(self) -> Any:
        """Returns a number of each example, of its length and a few of its tokens, that equal ones have in common."""
        starts, marks = self._starts[self._firsts], numpy.array(self._totals, dtype=numpy.int64)
        for part in range(PARTS):
            places = starts + numpy.asarray(self._totals) * part // PARTS
            marks = marks * PRIME + self.tokens[places]
        return marks

    def _content(self, index: int) -> bytes:
        """Returns a hash of the tokens of an example, and of which of them are trained."""
        start = int(self._starts[self._firsts[index]])
        part = slice(start, start + int(self._totals[index]))
        trained = numpy.asarray(self.weights[part]) > 0
        return hashlib.sha256(numpy.asarray(self.tokens[part]).tobytes() + trained.tobytes()).digest()[:16]

    _firsts: Any = field(init=False, repr=False)
    _starts: Any = field(init=False, repr=False)
    _totals: Any = field(init=False, repr=False)

    @_firsts.default
    def _first_branches(self) -> Any:
        return numpy.cumsum(self.branch_counts) - self.branch_counts

    @_starts.default
    def _first_tokens(self) -> Any:
        return numpy.cumsum(self.lengths) - self.lengths

    @_totals.default
    def _tokens_of_examples(self) -> Any:
        return numpy.add.reduceat(numpy.asarray(self.lengths), self._firsts) if len(self) else self.lengths


def as_preference(example: Demonstration, margin: float) -> Preference:
    """Returns an example whose branches are a chosen and a rejected reply."""
    chosen, rejected = example.branches
    return Preference(chosen=chosen, rejected=rejected, row=example.row, weight=example.weight, margin=margin)


def as_steps(example: Demonstration) -> StepLabels:
    """Returns an example whose only branch is a solution: weights above 0 are 1 + the label of the step that ends
    there."""
    (solution,) = example.branches
    ends_K = solution.weights_T.nonzero()[:, 0]
    return StepLabels(
        token_ids_T=solution.token_ids_T,
        ends=ends_K.tolist(),
        labels=(solution.weights_T[ends_K] - 1).tolist(),
        row=example.row,
        weight=example.weight,
        images=solution.images,
    )


@frozen(eq=False)
class PreparedPairs:
    """The preference pairs of a dataset, by index: of each example the branches are its chosen and rejected reply."""

    examples: PreparedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Preference:
        return as_preference(self.examples[index], float(self.examples.margins[index]))


@frozen(eq=False)
class PreparedLabels:
    """The labelled replies of a dataset, by index: the reply of each row, of a pair the chosen one, and after them the
    rejected replies, so that neighbours seldom answer one prompt."""

    examples: PreparedExamples

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Label:
        example, branch = self.examples[int(self._places[index])], self._branch(index)
        return Label(
            reply=example.branches[int(index >= len(self.examples))],
            desirable=bool(self.examples.labels[branch]),
            row=example.row,
            weight=example.weight,
            place=index,
        )

    def prompt_key(self, index: int) -> bytes:
        """Returns the `prompt_key` of the reply of a label, without its images."""
        examples, branch = self.examples, self._branch(index)
        start = int(examples._starts[branch])
        trained = numpy.asarray(examples.weights[start : start + int(examples.lengths[branch])]) > 0
        context = examples.tokens[start : start + int(trained.argmax())]
        return prompt_key(torch.from_numpy(context.astype(numpy.int64)))

    def _branch(self, index: int) -> int:
        return int(self.examples._firsts[self._places[index]]) + int(index >= len(self.examples))

    _places: Any = field(init=False, repr=False)

    @_places.default
    def _rows_of_replies(self) -> Any:
        return numpy.concatenate(
            [numpy.arange(len(self.examples)), numpy.flatnonzero(self.examples.branch_counts == 2)]
        )


@frozen(eq=False)
class PreparedSteps:
    """The solutions of a dataset, by index."""

    examples: PreparedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> StepLabels:
        return as_steps(self.examples[index])
