"""Files of trajectories: their names, their order, and reading them.

Importable without torch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def step_of(path: Path) -> int:
    """Returns the step of a file of trajectories."""
    return int(_digits(path))


def read_trajectories(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Returns a file's rows, of all columns by default.

    Raises:
        DataError: it is broken, or of a later version of rollgrad.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # In this thread alone: one of pyarrow's own may be at work when the interpreter ends, which aborts it.
        with parquet.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(VERSION_KEY.encode(), b"").decode()
            if version != VERSION:
                raise DataError(
                    f"{path} has trajectories of version {version or 'unknown'}, and this rollgrad reads {VERSION}: "
                    "install a newer one."
                )
            return file.read(columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({str(error)[:200]}): remove it, or read another run.") from error


def rows(run: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of all of a run's files, by step, with these columns.

    Raises:
        DataError: a file is broken.
    """
    for path in trajectory_files(run):
        yield from read_trajectories(path, columns).to_pylist()


def _digits(path: Path) -> str:
    return path.stem.partition("-")[2]
