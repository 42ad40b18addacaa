"""The runs below a directory. Importable without torch."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.run_directory import is_run
from rollgrad.entrypoints.ui.run_view import RunView

DEEPEST = 4
"""Levels below a directory at which its runs are looked for: runs of loops are in folders of their iterations."""
NO_RUNS = frozenset({"model", "best", "trajectories", "rescored", "profile"})
"""Directories of a run in which there is no other one."""
MOST_RUNS = 1000
HOME = "runs"
"""Directory in which the newest run is looked for, if none is named."""


class Runs:
    """Runs below `root`, or the one that it holds itself. All methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()

    @property
    def single(self) -> bool:
        """Whether `root` holds a run itself: one that is about to begin has written nothing yet."""
        return is_run(self.root)

    def listed(self) -> dict[str, Any]:
        """Returns the runs, newest first, `MOST_RUNS` at most."""
        views = sorted(self._find(), key=lambda view: _changed(view.directory), reverse=True)
        problems = []
        if len(views) > MOST_RUNS:
            problems = [f"These are the newest {MOST_RUNS} of {len(views)} runs: name a directory with fewer."]
        rows = [view.row() for view in views[:MOST_RUNS]]
        return {"root": str(self.root), "single": self.single, "runs": rows, "problems": problems}

    def read_ahead(self) -> None:
        """Reads the rollouts of the only run, so that who asks for them soon does not wait."""
        if self.single:
            (view,) = self._find()
            view.rollouts()

    def view(self, id: str) -> RunView:
        """Returns one run.

        Raises:
            DataError: there is none of this name.
        """
        for view in (self._views.get(id),) if id in self._views else self._find():
            if view is not None and view.id == id and is_run(view.directory):
                return view
        raise DataError(f"There is no run {id!r} in {self.root}.")

    def _find(self) -> list[RunView]:
        with self._lock:
            found = []
            single = self.single
            for directory in (self.root,) if single else _runs_below(self.root, DEEPEST):
                name = self.root.resolve().name if single else directory.relative_to(self.root).as_posix()
                id = name.replace("~", "~.").replace("/", "~")  # no name begins with a dot: a/b is not a~b
                self._views.setdefault(id, RunView(directory, id=id, name=name))
                found.append(self._views[id])
            return found


def newest_run(home: Path = Path(HOME)) -> Path:
    """Returns the newest run below a directory.

    Raises:
        DataError: there is none.
    """
    found = [home] if is_run(home) else list(_runs_below(home, DEEPEST))
    if not found:
        raise DataError(f"There is no run below {home}: name the directory of one, or one that holds runs.")
    return max(found, key=_changed)


def _runs_below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return
    left_out = NO_RUNS if is_run(directory) else ()
    for name in names:
        if name in left_out:
            continue
        if is_run(directory / name):
            yield directory / name
        if depth > 1:
            yield from _runs_below(directory / name, depth - 1)


def _changed(run: Path) -> float:
    """Returns when a run last logged or began."""
    times = []
    for name in ("run.json", "metrics.jsonl", "samples.jsonl", "trajectories"):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
