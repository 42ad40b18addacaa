"""Checkpoints on the disk by their `tinker://RUN/KIND/NAME` paths: weights, the optimizer's state, and what they are.

Invariants: a checkpoint is there whole or not at all; none is overwritten unless a client asks for it; a path never
leaves the directory. Does not own: the files in a checkpoint.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.errors import CheckpointError

STATE, SAMPLER = "weights", "sampler_weights"
"""Kinds: with the state of the optimizer to train on from, and adapters to sample with."""

DESCRIPTION = "tinker.json"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")


@frozen(kw_only=True)
class Description:
    """Says what a training run or a checkpoint is of."""

    base_model: str
    lora_rank: int
    user_metadata: dict[str, str]


class Shelf:
    """Checkpoints in `directory`, which is made when the first is written; weights without a name, each for one
    sampler, are in `snapshots`, which is there."""

    def __init__(self, directory: Path, snapshots: Path) -> None:
        self._directory = directory
        self._snapshots = snapshots

    def write(
        self,
        run: str,
        kind: str,
        name: str,
        description: Description,
        write: Callable[[Path], None],
        *,
        overwrite: bool,
    ) -> str:
        """Writes a checkpoint by `write`, which fills a directory; returns its path.

        Raises:
            CheckpointError: the name cannot be used, is taken, or the files cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"The checkpoint's name is {name!r}: use letters, digits, '_', '-' and '.' alone.")
        place = self._directory / _folder(run) / kind / name
        if place.exists() and not overwrite:
            raise CheckpointError(f"There is a checkpoint {kind}/{name} of this run: choose another name.")
        part, old = (place.with_name(f".{name}.{suffix}") for suffix in ("part", "old"))
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            self._describe(part, description)
            if place.exists():
                if old.exists():  # left by a write that was killed before it had removed it
                    shutil.rmtree(old)
                place.rename(old)
            part.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"The checkpoint cannot be written to {place} ({error}): {remedy(error)}.") from error
        return f"tinker://{run}/{kind}/{name}"

    def snapshot(self, sampler: str, write: Callable[[Path], None]) -> Path:
        """Writes weights without a name; returns their directory.

        Raises:
            CheckpointError: the files cannot be written.
        """
        place = self._snapshots / _folder(sampler)
        try:
            place.mkdir(parents=True, exist_ok=True)
            write(place)
        except OSError as error:
            raise CheckpointError(
                f"The weights of the sampler cannot be written to {place} ({error}): {remedy(error)}, or start "
                "the server with TMPDIR in a directory that has some."
            ) from error
        return place

    def drop_snapshot(self, sampler: str) -> None:
        """Deletes weights without a name; does nothing if there are none."""
        shutil.rmtree(self._snapshots / _folder(sampler), ignore_errors=True)

    def find(self, path: str, *kinds: str) -> tuple[Path, Description]:
        """Returns a checkpoint's directory and description; `kinds` are those that will do.

        Raises:
            CheckpointError: there is none, or it is of another kind.
        """
        found = _PATH.fullmatch(path)
        if found is None or not _NAME.fullmatch(found[3]):
            raise CheckpointError(f"{path!r} is no checkpoint: write tinker://RUN/{kinds[0]}/NAME.")
        run, kind, name = found.groups()
        if kind not in kinds:
            raise CheckpointError(f"{path} is of the kind {kind}, but this needs {' or '.join(kinds)}.")
        place = self._directory / _folder(run) / kind / name
        return place, self._description(place, path)

    def delete(self, run: str, kind: str, name: str) -> None:
        """Deletes a checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        place, _ = self.find(f"tinker://{run}/{kind}/{name}", STATE, SAMPLER)
        shutil.rmtree(place)

    def add_run(self, run: str, description: Description) -> None:
        """Notes a training run, for `run`."""
        place = self._directory / _folder(run)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._describe(place, description)
        except OSError as error:
            raise CheckpointError(
                f"The training run cannot be written to {place} ({error}): {remedy(error)}."
            ) from error

    def run(self, run: str) -> Description:
        """Returns a training run's description.

        Raises:
            CheckpointError: there is none.
        """
        return self._description(self._directory / _folder(run), run)

    def _describe(self, place: Path, description: Description) -> None:
        (place / DESCRIPTION).write_text(json.dumps(asdict(description)), encoding="utf-8")

    def _description(self, place: Path, name: str) -> Description:
        try:
            fields: dict[str, Any] = json.loads((place / DESCRIPTION).read_text(encoding="utf-8"))
            return Description(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"There is no {name} here ({type(error).__name__}): see {self._directory}."
            ) from error


def _folder(run: str) -> str:
    """Returns the name of the folder of a run or sampler, whose ids have colons."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run)
