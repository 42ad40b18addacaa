"""Columns of examples that nothing is read from, so that people see what is left out.

Does not own: which columns a format has (`formats`): it is asked.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rollgrad.adapters.chat.row_error import RowError
from rollgrad.adapters.data.examples.formats import READERS
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.rows import Rows
from rollgrad.application.settings.sections.examples import ExampleFormat

ASKED = 8
"""Rows that are read to see which columns they take."""
ALWAYS = ("weight", "image_places", "datasource", "data_source")
"""Columns that are read in every format, the last two by evaluations."""


class _Watched(Mapping[str, Any]):
    """A row that notes in `taken` which of its columns are asked for."""

    def __init__(self, row: Mapping[str, Any], taken: set[str]) -> None:
        self._row, self._taken = row, taken

    def __getitem__(self, name: str) -> Any:
        self._taken.add(name)
        return self._row[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def unread_columns(
    columns: Collection[str], rows: Rows, kind: ExampleFormat, settings: ReadingSettings
) -> tuple[str, ...]:
    """Returns those of `columns` that reading the first of `rows` as `kind` does not ask for; none if no row can be
    read."""
    taken: set[str] = {*ALWAYS, settings.image_key or ""}
    readable = False
    for index in range(min(ASKED, len(rows))):
        with suppress(RowError, RecursionError):
            READERS[kind](_Watched(rows[index], taken), settings)
            readable = True
    return tuple(sorted(set(columns) - taken)) if readable else ()
