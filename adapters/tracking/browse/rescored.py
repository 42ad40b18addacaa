"""New rewards of a run's rollouts: `RUN/rescored/NAME.json`, beside the stored ones, which stay."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.errors import CheckpointError, DataError

RESCORED = "rescored"
"""Directory of the files."""


def with_changes(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows, which have `key`, `old` and `new` reward (None where there is none), with what changed within
    the group that a key names. `sign_changed` says whether the reply is now on the other side of its group's mean,
    `rank_changed` whether more or fewer replies of its group are better than it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["key"].rsplit("/", 2)[0], []).append(dict(row))
    for members in groups.values():
        known = [row for row in members if row["old"] is not None and row["new"] is not None]
        for row in members:
            row["sign_changed"] = row in known and _sign(row, known, "old") != _sign(row, known, "new")
            row["rank_changed"] = row in known and _rank(row, known, "old") != _rank(row, known, "new")
    return [row for members in groups.values() for row in members]


def _sign(row: Mapping[str, Any], group: list[dict[str, Any]], name: str) -> int:
    mean = math.fsum(other[name] for other in group) / len(group)
    return bool(row[name] > mean) - bool(row[name] < mean)


def _rank(row: Mapping[str, Any], group: list[dict[str, Any]], name: str) -> int:
    return sum(bool(other[name] > row[name]) for other in group)


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns numbers of rows: all, with the same reward, with another sign or rank in their group, and without a new
    reward."""
    listed = list(rows)
    return {
        "rows": len(listed),
        "same": sum(row["new"] is not None and row["new"] == row["old"] for row in listed),
        "sign_changed": sum(row["sign_changed"] for row in listed),
        "rank_changed": sum(row["rank_changed"] for row in listed),
        "failed": sum(row["new"] is None for row in listed),
    }


def write_rescored(run: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Writes new rewards under a name, and returns the path.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = run / RESCORED / f"{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(content).encode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error}): {remedy(error)}.") from error
    return path


def rescored_files(run: Path) -> list[Path]:
    """Returns the files of new rewards, oldest first: their names begin with the time."""
    return sorted((run / RESCORED).glob("*.json"))


def read_rescored(path: Path) -> dict[str, Any]:
    """Returns the content of a file of new rewards.

    Raises:
        DataError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        rewards_of(content)
        dict(content["summary"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} has no new rewards ({type(error).__name__}): remove it.") from error
    return dict(content)


def rewards_of(content: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the new rewards by key."""
    return {row["key"]: row["new"] for row in content["rows"]}
