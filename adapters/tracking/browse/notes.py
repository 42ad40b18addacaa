"""Stars, tags and notes of a run's rollouts: `notes.jsonl`, one line a change, the last of a key counts.

The only file that the page writes.
"""

import fcntl
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.errors import CheckpointError, DataError

NOTES_FILE = "notes.jsonl"
LONGEST = 10_000
"""Characters of a note; a tag has at most 100."""
LONGEST_TAG = 100
MOST_TAGS = 50


@frozen
class Note:
    """Note of a rollout: `star`, `tags`, `note` (None without text), and when (`time`, UTC)."""

    star: bool = False
    tags: tuple[str, ...] = ()
    note: str | None = None
    time: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the note as JSON has it."""
        return asdict(self) | {"tags": list(self.tags)}


def read_notes(run: Path) -> dict[str, Note]:
    """Returns the notes of a run by the keys of its rollouts; lines that cannot be read are left out."""
    try:
        return _notes_in((run / NOTES_FILE).read_bytes())
    except OSError:
        return {}


def _notes_in(content: bytes) -> dict[str, Note]:
    notes: dict[str, Note] = {}
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
            notes[str(row["key"])] = changed(Note(), row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return notes


def changed(note: Note, change: Mapping[str, Any]) -> Note:
    """Returns a note with the parts that `change` has.

    Raises:
        DataError: a part is of another type, or too long.
    """
    star, tags, text = change.get("star", note.star), change.get("tags", note.tags), change.get("note", note.note)
    if not isinstance(star, bool):
        raise DataError("star is neither true nor false.")
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) and tag for tag in tags):
        raise DataError("tags is no list of words.")
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise DataError(
            f"tags are more than {MOST_TAGS}, or one is longer than {LONGEST_TAG} characters: shorten them."
        )
    if text is not None and (not isinstance(text, str) or len(text) > LONGEST):
        raise DataError(f"note is no text of at most {LONGEST} characters: shorten it.")
    time = change.get("time", note.time)
    return evolve(note, star=star, tags=tuple(dict.fromkeys(tags)), note=text or None, time=time)


def write_note(run: Path, key: str, change: Mapping[str, Any]) -> Note:
    """Changes the note of a rollout, and returns it. On file systems with locks, others that change notes of the run at
    this moment wait. So each finds what the ones before have written.

    Raises:
        DataError: the change is of another form.
        CheckpointError: it cannot be written.
    """
    parts = {name: change[name] for name in ("star", "tags", "note") if name in change}
    changed(Note(), parts)  # before there is a file
    path = run / NOTES_FILE
    try:
        with path.open("ab+") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            file.seek(0)
            content = file.read()
            note = changed(_notes_in(content).get(key, Note()), parts)
            note = evolve(note, time=datetime.now(UTC).isoformat(timespec="seconds"))
            line = (json.dumps({"key": key, **note.as_dict()}) + "\n").encode()
            # A line that a crash cut off must not swallow this one.
            file.write(line if content[-1:] in (b"", b"\n") else b"\n" + line)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error}): {remedy(error)}.") from error
    return note
