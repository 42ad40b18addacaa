"""Sources of rows: files, folders, hub names, alone or mixed.

JSON lines are read one at a time, by Python's own parser. So a column may have several types, a row has only the keys
that are written in it, and a line that cannot be read is one row that cannot be used. Everything else is read as for
prompts (`adapters/data/datasets/loading`).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy
from attrs import field, frozen

from rollgrad.adapters.chat.row_error import RowError
from rollgrad.adapters.data.datasets.files import (
    COMPRESSED,
    UNREADABLE,
    are_json_lines,
    check_name,
    data_files,
    note_files,
    opened,
    split_configuration,
)
from rollgrad.adapters.data.datasets.loading import load_dataset, origin
from rollgrad.adapters.data.datasets.several import interleaved, shares
from rollgrad.adapters.data.examples.content import local_hash
from rollgrad.adapters.data.examples.joined import LABELLED, JoinedPairs, is_labelled, joined
from rollgrad.adapters.data.examples.kept_index import kept_index
from rollgrad.adapters.data.examples.ranked import RankedPairs, pair_ends
from rollgrad.adapters.data.examples.recognition import PAIR_COLUMNS, ReadingSettings, find_format
from rollgrad.adapters.data.examples.rows import Rows, broken, decoded
from rollgrad.adapters.data.examples.unread import unread_columns
from rollgrad.adapters.system.plain_values import json_fault
from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.domain.errors import DataError
from rollgrad.domain.splits import Split, parse_split

LOOKED_AT = 100
"""Rows whose columns tell the format."""


@frozen(eq=False)
class Source:
    """One dataset: its `rows`, their format, where each stands (`place`), a hash of all of them, and the columns that
    nothing is read from."""

    name: str
    rows: Rows
    kind: ExampleFormat
    fingerprint: str
    unread: tuple[str, ...] = ()

    def place(self, index: int) -> str:
        """Returns where row `index` stands, for people: FILE:LINE, or the name and number of the row."""
        rows = self.rows
        if isinstance(rows, Head):
            return rows.places[index]
        if isinstance(rows, RankedPairs | JoinedPairs):
            index, rows = rows.row(index), rows.rows
        if isinstance(rows, JsonLines):
            return rows.place(index)
        return f"{self.name} row {index + 1}"


@frozen(eq=False)
class Mixture:
    """Rows of several sources in one order: row i of the whole is row `rows[i]` of the source `parts[of[i]]`."""

    parts: tuple[Source, ...]
    of: Sequence[int] = field(repr=False)
    rows: Sequence[int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.of)

    def source(self, index: int) -> tuple[Source, int]:
        """Returns the source of row `index`, and the row's number in it."""
        return self.parts[int(self.of[index])], int(self.rows[index])

    def datasources(self, names: Sequence[str]) -> list[str]:
        """Returns the origin of each row: what its column `datasource` or `data_source` says, else the name in `names`
        of its part."""
        bases = [_given(part.rows) for part in self.parts]
        # Of a table the column alone is read: its rows may have pictures.
        columns = [rows.column("datasource") if isinstance(rows, Table) else None for rows in bases]
        found = []
        for index, part in enumerate(self.of):
            source, number = self.source(index)
            if isinstance(source.rows, RankedPairs | JoinedPairs):
                number = source.rows.row(number)
            column = columns[part]
            try:
                given = _datasource(bases[part][number]) if column is None else column[number]
            except RowError:  # it is counted when all rows are read
                given = None
            found.append(names[part] if given in (None, origin(source.name)) else str(given))
        return found

    @property
    def fingerprint(self) -> str:
        """Hash of all rows in their order."""
        whole = hashlib.sha256()
        for part in self.parts:
            whole.update(f"{part.kind} {part.fingerprint}\n".encode())
        whole.update(numpy.asarray(self.of, dtype=numpy.int64).tobytes())
        whole.update(numpy.asarray(self.rows, dtype=numpy.int64).tobytes())
        return whole.hexdigest()


class JsonLines:
    """Rows of files of JSON lines, or a slice of them that `split` asks for, each read when it is asked for.

    Raises:
        DataError: a file cannot be read, or none has rows.
    """

    def __init__(self, name: str, paths: Sequence[Path], split: Split) -> None:
        self._paths = paths
        self._unpacked: dict[int, BinaryIO] = {}
        self._rows: list[tuple[int, int, int, int]] = []  # file, number of the line, first byte, bytes
        content = hashlib.sha256()
        for file, path in enumerate(paths):
            if file:
                content.update(b"\0")  # a line that ends with its file is none with the next file's first
            # What is compressed has no places to jump to.
            copy = TemporaryFile() if path.suffix in COMPRESSED else None  # noqa: SIM115  # rows are read later
            start = 0
            for number, line in json_lines(path, blank=True):
                content.update(line)
                if copy is not None:
                    copy.write(line)
                if line.strip():
                    self._rows.append((file, number, start, len(line)))
                start += len(line)
            if copy is not None:
                copy.flush()
                self._unpacked[file] = copy
        if not self._rows:
            raise DataError(f"The dataset {name} has no rows: at least one is needed.")
        if split.sliced:
            chosen = split.rows(len(self._rows), name, "--data.split")
            content.update(repr(chosen).encode())
            self._rows = self._rows[chosen.start : chosen.stop]
        self.fingerprint = content.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        """Returns FILE:LINE of row `index`, lines from 1."""
        file, line, _, _ = self._rows[index]
        return f"{self._paths[file]}:{line}"

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, _, start, size = self._rows[index]
        copy = self._unpacked.get(number)
        if copy is not None:
            return parse_line(os.pread(copy.fileno(), size, start))
        with self._paths[number].open("rb") as file:
            file.seek(start)
            return parse_line(file.read(size))


class Table:
    """Rows of a dataset that is open, whose pictures are decoded when a row is read."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def column(self, name: str) -> Any:
        """Returns a column, None if there is none of this name."""
        return self._rows[name] if name in self._rows.column_names else None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return decoded(lambda: self._rows[index])


class Head:
    """The first rows of a dataset, and where each stands (`places`)."""

    def __init__(self, places: Sequence[str], contents: Sequence[Mapping[str, Any] | RowError]) -> None:
        self.places = places
        self._contents = contents

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        content = self._contents[index]
        if isinstance(content, RowError):
            raise content
        return content


def json_lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file, with their numbers from 1; empty ones only if `blank`.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if blank or line.strip():
                    yield number, line
    except UNREADABLE as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"The dataset file {path} cannot be read ({why}): check it.") from error


def parse_line(line: bytes) -> Mapping[str, Any]:
    """Returns the row in a line of JSON.

    Raises:
        RowError: it is no JSON object in UTF-8.
    """
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise broken(f"The line is not UTF-8 (byte {error.start}: {line[error.start : error.start + 1]!r}).") from error
    except (ValueError, RecursionError) as error:
        raise broken(f"The line is not JSON: {json_fault(error)}.") from error
    if not isinstance(row, dict):
        raise broken("The line holds no object ({...}).")
    return row


def open_head(name: str, head: Head, settings: ReadingSettings) -> Mixture:
    """Returns the first rows of a dataset as if they were all.

    Raises:
        DataError: there is none, their format cannot be told, or all have to be read.
    """
    if not len(head):
        raise DataError(f"The dataset {name} has no rows: at least one is needed.")
    if _makes_pairs(settings) and is_labelled(_columns(head, name).keys(), settings.input_key or "prompt"):
        raise DataError(
            f"The rows of {name} are labelled replies, which become pairs when all are read: leave --data.stream out, "
            "or learn from them with rollgrad train kto."
        )
    source = _source(name, head, hashlib.sha256(repr(head._contents).encode(errors="replace")).hexdigest(), settings)
    return Mixture((source,), [0] * len(head), range(len(head)))


def is_local(name: str) -> bool:
    """Returns whether a dataset is a file or a folder of this machine, and no name on the hub.

    Raises:
        DataError: the file system cannot tell.
    """
    check_name(name)
    place = Path(split_configuration(name)[0])
    local = data_files(name) is not None or Path(name).exists() or place.is_dir()
    return local or name.startswith((".", "/", "~"))


def open_sources(
    spec: str,
    *,
    split: str,
    probs: tuple[float, ...] | None,
    seed: int,
    max_samples: int | None,
    settings: ReadingSettings,
    cache_dir: Path | None = None,
    evenly: bool = False,
) -> Mixture:
    """The rows of one or several comma-separated datasets.

    Args:
        spec: files, patterns of files, folders, hub names, as for prompts.
        split: read where it exists.
        probs: rows are drawn from the sets by these probabilities until each has been read to its end; None lets sets
            follow one another.
        seed: seed of these draws.
        max_samples: keeps the first rows, with `evenly` as many of each set as of the others; None keeps all.
        settings: how rows are read.
        cache_dir: keeps which rows make pairs, if all rows have to be read to find them; None keeps nothing.

    Raises:
        DataError: a set cannot be read, or its format cannot be told.
    """
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise DataError("No dataset is set: --data.dataset needs a file, a saved folder or a hub name.")
    parts = tuple(_open(name, split, settings, cache_dir) for name in names)
    sizes = [len(part.rows) for part in parts]
    of, rows = interleaved(shares(sizes, max_samples) if evenly else sizes, probs, seed)
    limit = len(of) if max_samples is None else max_samples
    return Mixture(parts, of[:limit], rows[:limit])


def _open(name: str, split: str, settings: ReadingSettings, cache_dir: Path | None) -> Source:
    check_name(name)
    files = data_files(name)
    rows: Rows
    if files is not None and are_json_lines(files):
        note_files(name, files)
        lines = JsonLines(name, files, parse_split(split))
        rows, fingerprint = lines, lines.fingerprint
    else:
        dataset = load_dataset(name, split=split, probs=None, seed=0, max_samples=None, split_flag="--data.split")
        rows, fingerprint = Table(dataset), local_hash(name, split) or str(dataset._fingerprint)
    if _makes_pairs(settings):
        rows = _as_pairs(rows, name, fingerprint, settings, cache_dir)
    return _source(name, rows, fingerprint, settings)


def _makes_pairs(settings: ReadingSettings) -> bool:
    """Returns whether rows are to be pairs, also where they do not name two replies."""
    return settings.format is ExampleFormat.PAIRS and not (settings.chosen_key or settings.rejected_key)


def _as_pairs(rows: Rows, name: str, fingerprint: str, settings: ReadingSettings, cache_dir: Path | None) -> Rows:
    """Returns rows of which each is a pair, where labelled or ranked replies make them."""
    directory = None if cache_dir is None else cache_dir / "pairs"
    prompt_key, every = settings.input_key or "prompt", settings.all_pairs
    if is_labelled(_columns(rows, name).keys(), prompt_key):
        find = partial(joined, rows, prompt_key=prompt_key, image_key=settings.image_key, every=every)
        pairs = kept_index(directory, find, "labelled", fingerprint, prompt_key, settings.image_key, every)
        return JoinedPairs(rows, pairs, prompt_key=prompt_key)
    if not every:
        return rows
    return RankedPairs(rows, kept_index(directory, partial(pair_ends, rows), "ranked", fingerprint))


def _source(name: str, rows: Rows, fingerprint: str, settings: ReadingSettings) -> Source:
    columns = _columns(_given(rows), name)
    if isinstance(rows, JoinedPairs):
        columns |= {name: [] for name in PAIR_COLUMNS}
    kind = find_format(list(columns), name, settings, columns.get("label", ()))
    unread = unread_columns(columns.keys() - (LABELLED if isinstance(rows, JoinedPairs) else ()), rows, kind, settings)
    return Source(name, rows, kind, fingerprint, unread)


def _datasource(row: Mapping[str, Any]) -> Any:
    return row["datasource"] if "datasource" in row else row.get("data_source")


def _given(rows: Rows) -> Rows:
    """Returns the rows that the dataset has, of which pairs may be made."""
    return rows.rows if isinstance(rows, RankedPairs | JoinedPairs) else rows


def _columns(rows: Rows, source: str) -> dict[str, list[Any]]:
    """The columns that have a value in one of the first rows, with these values.

    Raises:
        DataError: none of these rows can be read.
    """
    seen: dict[str, list[Any]] = {}
    first_rows = range(min(LOOKED_AT, len(rows)))
    unread: list[RowError] = []
    for index in first_rows:
        try:
            row = rows[index]
        except RowError as error:  # it is counted when all rows are read
            unread.append(error)
            if len(unread) == len(first_rows):
                raise DataError(f"No row of {source} can be read; of the first: {unread[0]}") from unread[0]
            continue
        for name, value in row.items():
            if value is not None:
                seen.setdefault(name, []).append(value)
    return seen
