"""A run as experiment trackers are told of it, and the ids that they know it by."""

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import TRACKERS_FILE

_ids = threading.Lock()  # the file is shared by trackers, each of which has a thread


@frozen(kw_only=True)
class TrackedRun:
    """A run as experiment trackers are told of it.

    `directory` is the run's output directory, in which trackers keep what they cannot send. `settings` are nested
    mappings without secrets. `organization` is a team or workspace of the tracker; None is the user's own.
    """

    project: str
    name: str
    directory: Path
    settings: Mapping[str, Any]
    group: str | None = None
    organization: str | None = None

    def id_in(self, tracker: str, make: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
        """Returns the id that `tracker` knows the run by. It is made at first and kept in `trackers.json`, so that a
        run that continues also continues its curves.

        Raises:
            OSError: the file cannot be read or written.
        """
        path = self.directory / TRACKERS_FILE
        known = _read(path).get(tracker)
        if known is not None:
            return str(known)
        made = make()  # which may ask a server: other trackers do not wait for it
        with _ids:
            keep_locked(self.directory)
            replace_file(path, json.dumps(_read(path) | {tracker: made}).encode())
        return made


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by their dotted names.

    >>> flat({"train": {"seed": 1}, "title": "a"})
    {'train.seed': 1, 'title': 'a'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
