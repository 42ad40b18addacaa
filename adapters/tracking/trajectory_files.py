"""Files of trajectories: their names, their order, and reading them.

Importable without torch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rollgrad.adapters.checkpoints.names import TRAJECTORIES
from rollgrad.domain.errors import DataError

if TYPE_CHECKING:
    import pyarrow

VERSION = "1"
"""Version of the format; it changes where a column gets another meaning, not where one is added."""
VERSION_KEY = "rollgrad.trajectories"

HIDDEN_TOKEN = -1
"""Id in the place of a token that is part of a secret."""

PREFIXES = {"update": "step-", "evaluation": "eval-"}
"""Beginnings of files' names, before the number of the step with six digits."""


def trajectory_files(run: Path) -> list[Path]:
    """Returns the files of trajectories of a run's directory, by step; of one step, the update's before the
    evaluation's."""
    files = [path for prefix in PREFIXES.values() for path in (run / TRAJECTORIES).glob(f"{prefix}*.parquet")]
    return sorted((path for path in files if _digits(path).isdecimal()), key=lambda p: (step_of(p), p.name[0] == "e"))


def trajectory_path(run: Path, step: int, kind: str = "update") -> Path:
    """Returns the file of an update's or an evaluation's trajectories."""
    return run / TRAJECTORIES / f"{PREFIXES[kind]}{step:06d}.parquet"


def step_of(path: Path) -> int:
    """Returns the step of a file of trajectories."""
    return int(_digits(path))


def read_trajectories(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Returns a file's rows, of all columns by default.

    Raises:
        DataError: it is broken, or of a later version of rollgrad.
    """
    with _opened(path) as file:
        # In this thread alone: one of pyarrow's own may be at work when the interpreter ends, which aborts it.
        return file.read(columns=columns, use_threads=False)


def read_rows(path: Path, numbers: Sequence[int], columns: Sequence[str]) -> "pyarrow.Table":
    """Returns some rows of a file, by their numbers and in that order; only the row groups that hold them are read.

    Raises:
        DataError: it is broken, or of a later version of rollgrad, or has no such rows.
    """
    import pyarrow as pa

    with _opened(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        if max(numbers, default=0) >= starts[-1]:
            raise DataError(f"{path} has fewer rows than before: it was replaced, ask again.")
        groups = sorted({bisect_right(starts, number) - 1 for number in numbers})
        read = file.read_row_groups(groups, columns=list(columns), use_threads=False)
        before = dict(zip(groups, accumulate((sizes[group] for group in groups), initial=0), strict=False))
        places = [
            before[group] + number - starts[group] for number in numbers for group in [bisect_right(starts, number) - 1]
        ]
        return read.take(pa.array(places, type=pa.int64()))


@contextmanager
def _opened(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # Its buffer of whole columns beforehand is for storage far away, and takes a fifth of the time here.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            version = (file.schema_arrow.metadata or {}).get(VERSION_KEY.encode(), b"").decode()
            if version != VERSION:
                raise DataError(
                    f"{path} has trajectories of version {version or 'unknown'}, and this rollgrad reads {VERSION}: "
                    "install a newer one."
                )
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({str(error)[:200]}): remove it, or read another run.") from error


def _digits(path: Path) -> str:
    return path.stem.partition("-")[2]
