"""Index of all rollouts of a run: summary rows in memory, filtered and sorted; texts and tokens stay in the files.

Invariants: a file that cannot be read is named, and the others are shown; a file is read again only if it changed.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from rollgrad.adapters.checkpoints.names import SAMPLES_FILE
from rollgrad.adapters.system.plain_values import finite
from rollgrad.adapters.tracking.browse.filters import Kind, parse_filter
from rollgrad.adapters.tracking.browse.notes import Note, read_notes
from rollgrad.adapters.tracking.browse.summaries import (
    CUT,
    MAPS,
    kinds_of,
    plain,
    read_summaries,
    sample_rows,
    shortened,
    summaries,
)
from rollgrad.adapters.tracking.trajectory_files import read_trajectories, trajectory_files
from rollgrad.domain.errors import DataError, FilterError

if TYPE_CHECKING:
    import pyarrow

DEFAULT_SORT = "-step,group_id,-reward"
SEARCHES_KEPT = 16
READERS = 2
"""Threads that read files at first: more would wait for each other more than for the disk."""
SEARCHERS = 2
"""Threads that look for texts, each of which has all texts of a file in memory."""
MOST_POINTS = 20_000
"""Points of a scatter: more than a picture shows apart."""


@frozen
class _File:
    """A file as it was read: its time and size, its rows, or why there are none."""

    stamp: tuple[int, int]
    table: Any = None
    problem: str | None = None


@frozen(eq=False, slots=False)
class Rollouts:
    """Rollouts of a run at one moment: `table` has the summary rows, `sizes` the number of rows of each of `files`, in
    that order. `new_rewards` are those of the newest rescoring."""

    table: "pyarrow.Table"
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    problems: tuple[str, ...]
    notes: Mapping[str, Note]
    new_rewards: Mapping[str, float | None]

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def keys(self) -> list[str]:
        """Key of each row."""
        keys: list[str] = self.table["key"].to_pylist()
        return keys

    @cached_property
    def places(self) -> dict[str, int]:
        """Row of each key."""
        return {key: row for row, key in enumerate(self.keys)}

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Type of each column that a filter may name."""
        return kinds_of(self.table)

    def column(self, name: str) -> "pyarrow.ChunkedArray":
        """Returns a column by the name that filters have for it; of prompts, labels and responses the beginnings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        word, _, rest = name.partition(".")
        if rest and word in MAPS:
            column = self.table[MAPS[word]]
            values = [pc.map_lookup(chunk, pa.scalar(rest), "last") for chunk in column.chunks]
            return pa.chunked_array(values, type=pa.float64())
        made = {
            "star": lambda: pa.array([key in self.notes and self.notes[key].star for key in self.keys]),
            "tag": lambda: pa.array([list(self.notes[key].tags) if key in self.notes else [] for key in self.keys]),
            "note": lambda: pa.array(
                [self.notes[key].note if key in self.notes else None for key in self.keys], type=pa.string()
            ),
            "new_reward": lambda: pa.array([self.new_rewards.get(key) for key in self.keys], type=pa.float64()),
        }
        return pa.chunked_array([made[name]()]) if name in made else self.table[name]

    def containing(self, name: str, part: str) -> "pyarrow.ChunkedArray":
        """Returns for each row whether a column contains a text, in small or capital letters."""
        import pyarrow.compute as pc

        if name not in CUT or not self.files:
            return pc.match_substring(self.column(name), part, ignore_case=True)
        known = self._contained.get((name, part))
        return self._search([(name, part)])[0] if known is None else known

    def _search(self, searches: Sequence[tuple[str, str]]) -> list["pyarrow.ChunkedArray"]:
        """Returns for each search, a column and a part of its texts, which rows it finds, and keeps that. Whole texts
        are read file by file, each once for all searches, so that only a few files are in memory together."""
        import pyarrow as pa
        import pyarrow.compute as pc

        names = sorted({name for name, _ in searches})

        def of_file(file: Path, size: int) -> list[Any]:
            texts = read_trajectories(file, names)
            if len(texts) != size:
                raise DataError(f"{file} was replaced meanwhile: ask again.")
            return [pc.match_substring(texts[name], part, ignore_case=True) for name, part in searches]

        with ThreadPoolExecutor(SEARCHERS) as readers:
            files = list(readers.map(of_file, self.files, self.sizes))
        found = [
            pa.chunked_array([chunk for column in columns for chunk in column.chunks], type=pa.bool_())
            for columns in zip(*files, strict=True)
        ]
        self._contained.update(zip(searches, found, strict=True))
        for oldest in list(self._contained)[:-SEARCHES_KEPT]:
            self._contained.pop(oldest, None)  # unless another thread has done so
        return found

    @cached_property
    def _contained(self) -> dict[tuple[str, str], Any]:
        """Rows that the last searches found: a page of the list asks for the same as the one before."""
        return {}

    def find(self, condition: str, sort: str = DEFAULT_SORT) -> Any:
        """Returns the rows that a filter chooses, sorted: their numbers.

        Raises:
            FilterError: filter or order cannot be understood.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = pa.array(range(len(self)), type=pa.int64())
        wanted = parse_filter(condition, self.kinds)
        if wanted is not None:
            new = [search for search in wanted.searches if search[0] in CUT and search not in self._contained]
            if new and self.files:
                self._search(new)
            matches = wanted.condition(self)
            rows = rows.filter(matches.combine_chunks() if isinstance(matches, pa.ChunkedArray) else matches)
        keys = [(name.removeprefix("-"), "descending" if name[:1] == "-" else "ascending") for name in sort.split(",")]
        unknown = [name for name, _ in keys if self.kinds.get(name, Kind.TEXTS) is Kind.TEXTS]
        if unknown:
            raise FilterError(f'The order has no column "{unknown[0]}": sort by {", ".join(self.kinds)}.')
        columns: dict[str, Any] = {}
        order = []
        for name, direction in keys:
            columns[name] = self.column(name)
            columns[f"no {name}"] = pc.is_null(columns[name], nan_is_null=True)  # such rows come last
            order += [(f"no {name}", "ascending"), (name, direction)]
        return rows.take(pc.sort_indices(pa.table(columns).take(rows), sort_keys=order))

    def rows(self, numbers: Any) -> list[dict[str, Any]]:
        """Returns summary rows by their numbers, with notes, as JSON holds them."""
        import pyarrow as pa

        chosen = self.table.take(pa.array(numbers, type=pa.int64())).to_pylist()
        return [plain(row) | self._noted(row["key"]) for row in chosen]

    def _noted(self, key: str) -> dict[str, Any]:
        note = self.notes.get(key, Note())
        return {
            "star": note.star,
            "tags": list(note.tags),
            "note": note.note,
            "new_reward": self.new_rewards.get(key),
        }

    def points(self, condition: str, x: str, y: str, color: str | None) -> dict[str, Any]:
        """Returns two columns of the rows that a filter chooses, and a third for the colour; of very many rows as many
        as a picture shows, evenly taken.

        Raises:
            FilterError: filter or columns are unknown.
        """
        import pyarrow as pa

        for name in (x, y, *([color] if color else [])):
            if self.kinds.get(name, Kind.TEXTS) is Kind.TEXTS:
                raise FilterError(f'There is no column "{name}" to draw: take one of {", ".join(self.kinds)}.')
        rows = self.find(condition, "step,group_id,sample_id")
        shown = rows if len(rows) <= MOST_POINTS else rows.take(pa.array(_even(len(rows), MOST_POINTS)))
        columns = {"keys": "key", "x": x, "y": y} | ({"color": color} if color else {})
        drawn = {
            made: [
                finite(value)
                for value in (self.table["key"] if made == "keys" else self.column(name)).take(shown).to_pylist()
            ]
            for made, name in columns.items()
        }
        return {"matched": len(rows), "shown": len(shown), **drawn}

    def file_of(self, row: int) -> tuple[Path, int]:
        """Returns the file of a row, and its number there."""
        for file, size in zip(self.files, self.sizes, strict=True):
            if row < size:
                return file, row
            row -= size
        raise DataError("This rollout is no longer there: a run that goes on with a size limit removes the oldest.")


class RunIndex:
    """Keeps the rollouts of a run's directory. All methods may be called from any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._files: dict[Path, _File] = {}
        self._known: tuple[Any, Rollouts] | None = None

    def rollouts(self, new_rewards: Mapping[str, float | None] | None = None) -> Rollouts:
        """Returns what is there now; files that did not change are not read again."""
        with self._lock:
            paths = trajectory_files(self._run)
            self._files = {path: self._files[path] for path in paths if path in self._files}
            changed = [path for path in paths if path not in self._files or self._files[path].stamp != stamp(path)]
            with ThreadPoolExecutor(READERS) as readers:  # which starts no thread before it has work
                self._files |= dict(zip(changed, readers.map(self._read, changed), strict=True))
            self._files = {path: self._files[path] for path in paths}
            notes = read_notes(self._run)
            state = (tuple((path, file.stamp) for path, file in self._files.items()), notes, new_rewards)
            if self._known is None or self._known[0] != state or not paths:
                self._known = state, self._together(notes, new_rewards or {})
            return self._known[1]

    def _read(self, path: Path) -> _File:
        import pyarrow as pa

        read = stamp(path)
        try:
            return _File(read, read_summaries(path))
        except DataError as error:
            return _File(read, problem=str(error))
        except (pa.ArrowException, KeyError) as error:
            return _File(read, problem=f"{path} has other columns than rollouts ({str(error)[:200]}): remove it.")

    def _together(self, notes: Mapping[str, Note], new_rewards: Mapping[str, float | None]) -> Rollouts:
        import pyarrow as pa

        good = {path: file.table for path, file in self._files.items() if file.table is not None}
        problems = [file.problem for file in self._files.values() if file.problem is not None]
        tables: Sequence[Any] = list(good.values())
        if not self._files:
            try:
                tables = [shortened(sample_rows(self._run / SAMPLES_FILE))]
            except FileNotFoundError:
                pass
            except (OSError, pa.ArrowException) as error:
                problems.append(f"{SAMPLES_FILE} cannot be read ({error}).")
        empty = shortened(pa.table({}))
        return Rollouts(
            table=summaries(pa.concat_tables([empty, *tables])),
            files=tuple(good),
            sizes=tuple(map(len, good.values())),
            problems=tuple(problems),
            notes=notes,
            new_rewards=new_rewards,
        )


def stamp(path: Path) -> tuple[int, int]:
    """Returns time and size of a file; zeros for one that was removed meanwhile."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _even(count: int, most: int) -> list[int]:
    return [number * count // most for number in range(most)]
