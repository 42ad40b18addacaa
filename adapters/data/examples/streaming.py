"""Examples of a dataset that is read while training goes on: nothing is prepared before, nothing is kept.

Invariant: a position always gives the same example, however often the run was interrupted. Rows are read in their
order, in blocks, and each block is shuffled with a seed of its own; a position is a number of rows from the beginning.
Does not own: what rows say (`formats`), nor their tokens (`preparer`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import Any, Generic, TypeVar

import structlog
import torch
from attrs import frozen

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.chat.training_text import shared_prompt
from rollgrad.adapters.data.datasets.files import are_json_lines, check_name, data_files
from rollgrad.adapters.data.datasets.loading import load_dataset, stream_hub
from rollgrad.adapters.data.examples.prepared import as_preference, as_steps
from rollgrad.adapters.data.examples.preparer import PreparedRow, Preparer
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.adapters.data.examples.rows import decoded, overlong_row
from rollgrad.adapters.data.examples.sources import Table, is_local, json_lines, parse_line
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows
from rollgrad.domain.episodes.examples import Demonstration, Label, Preference, StepLabels, WeightedTokens
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.example_source import ExampleStream

log = structlog.get_logger(__name__)

Example = TypeVar("Example")

JUDGED_FROM = 1000
"""Rows from which on the share of those that cannot be used may end a run."""


@frozen
class StreamedRow:
    """A row, or why it cannot be read, or what decodes it when it is taken, and where it stands."""

    place: str
    held: Mapping[str, Any] | RowError | Callable[[], Mapping[str, Any]]

    @property
    def content(self) -> Mapping[str, Any] | RowError:
        """The row, or why it cannot be read. A row with pictures is decoded: a block of rows holds their files."""
        if isinstance(self.held, Mapping | RowError):
            return self.held
        try:
            return decoded(self.held)
        except RowError as error:
            return error


def stream_rows(name: str, split: str) -> Iterator[StreamedRow]:
    """Yields the rows of a dataset from its beginning: files of JSON lines line by line, a name on the hub as the hub
    sends it; other files and folders are opened first.

    Raises:
        DataError: it cannot be read.
    """
    check_name(name)
    files = data_files(name)
    if files is not None and are_json_lines(files):
        for path in files:
            for number, line in json_lines(path):
                try:
                    content: Mapping[str, Any] | RowError = parse_line(line)
                except RowError as error:
                    content = error
                yield StreamedRow(f"{path}:{number}", content)
        return
    if is_local(name):
        table = Table(load_dataset(name, split=split, probs=None, seed=0, max_samples=None, split_flag="--data.split"))
        for index in range(len(table)):
            yield StreamedRow(f"{name} row {index + 1}", partial(table.__getitem__, index))
        return
    for number, row in enumerate(stream_hub(name, split, "--data.split"), 1):
        yield StreamedRow(f"{name} row {number}", row)


def demonstration(row: PreparedRow, position: int) -> Demonstration:
    """Returns a row as an example to imitate."""
    shared = shared_prompt(row.branches)
    branches = tuple(
        WeightedTokens(
            token_ids_T=torch.tensor(branch.token_ids),
            weights_T=torch.tensor(branch.weights, dtype=torch.float32),
            prompt_length=shared,
            images=branch.images,
        )
        for branch in row.branches
    )
    return Demonstration(branches=branches, row=position, weight=row.weight)


def preference(row: PreparedRow, position: int) -> Preference:
    """Returns a row as a pair."""
    return as_preference(demonstration(row, position), row.margin)


def labelled(row: PreparedRow, position: int) -> Label:
    """Returns a row as a reply that is good or bad."""
    example = demonstration(row, position)
    (reply,), (desirable,) = example.branches, row.labels
    return Label(reply=reply, desirable=desirable, row=position, weight=example.weight, place=position)


def solution(row: PreparedRow, position: int) -> StepLabels:
    """Returns a row as a solution with labelled steps."""
    return as_steps(demonstration(row, position))


class StreamedExamples(ExampleStream[Example], Generic[Example]):
    """Examples of streamed rows.

    Args:
        rows: begins to read them from the first; after the last they are read again.
        kind: their format.
        preparer: makes tokens of them.
        form: makes an example of a row's tokens and its position: `demonstration`, `preference`, `labelled` or
            `solution`.
        buffer: rows of a block, which is held in memory and shuffled.
        seed: gives the order of each block.
        max_dropped: share of rows that may be unusable, judged from `JUDGED_FROM` rows on.
        overlong: ERROR ends the run at a row that is too long, which is dropped otherwise unless `preparer` cuts it.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[StreamedRow]],
        kind: ExampleFormat,
        preparer: Preparer,
        form: Callable[[PreparedRow, int], Example],
        *,
        buffer: int,
        seed: int,
        max_dropped: float,
        overlong: LongRows = LongRows.DROP,
    ) -> None:
        self._rows, self._kind, self._preparer, self._form = rows, kind, preparer, form
        self._overlong = overlong
        self._buffer, self._seed, self._max_dropped = buffer, seed, max_dropped
        self._blocks = self._read()
        self._start, self._block = 0, list[StreamedRow]()
        self.report = DataReport()
        """Counts of the rows that this process has taken."""

    def at(self, position: int) -> Example | None:
        """Implements `ExampleStream.at`.

        Raises:
            DataError: too many rows cannot be used, or one is too long and that is an error, or the dataset cannot be
                read.
        """
        row = self._row(position)
        report = self.report
        report.rows += 1
        try:
            content = row.content
            if isinstance(content, RowError):
                raise content
            made = self._preparer.prepare(content, self._kind)
        except RowError as error:
            if error.reason is Reason.OVERLONG and self._overlong is LongRows.ERROR:
                raise overlong_row(row.place, error.sentence) from error
            if error.reason.value not in report.dropped:
                log.warning(f"{row.place}: {error}", reason=error.reason.value)
            report.drop(error.reason, row.place, str(error))
            if report.rows >= JUDGED_FROM:
                report.check(self._max_dropped, "data.dataset")
            return None
        report.used += 1
        return self._form(made, position)

    def _row(self, position: int) -> StreamedRow:
        if position < self._start:
            self._blocks = self._read()
            self._start, self._block = 0, []
        while position >= self._start + len(self._block):
            self._start += len(self._block)
            self._block = next(self._blocks)
        return self._block[position - self._start]

    def _read(self) -> Iterator[list[StreamedRow]]:
        """Yields the blocks, without end; none has rows of two passes over the data."""
        numbers = count()
        while True:
            rows, any_row = self._rows(), False
            while block := list(islice(rows, self._buffer)):
                any_row = True
                order = PromptCursor(self._seed, epoch=next(numbers)).order(len(block))
                yield [block[place] for place in order.tolist()]
            if not any_row:
                raise DataError("The streamed dataset has no rows: at least one is needed.")
