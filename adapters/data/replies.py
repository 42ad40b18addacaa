"""Files of sampled replies: one JSON object a line, appended, and continued after whatever ended the process.

Invariants: every line but the last is whole, and an incomplete last one is removed; a file is continued only by what
began it (its description lies beside it, in a file of the same name with `.json` behind it); one process at a time
writes it.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.checkpoints.lock import locked
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.replies import Reply
from rollgrad.domain.errors import CheckpointError, DataError

log = structlog.get_logger(__name__)

Row = dict[str, Any]
Key = tuple[int, int]
"""Row and sample."""

CHUNK_ROWS = 256
CHUNK_SECONDS = 1.0
"""A chunk is on the disk when it has so many rows, or after so long: that much is sampled again after a kill."""
PIECE = 2**20
"""Bytes written at once, which every system takes whole while there is room."""
LONGEST_SHOWN = 60
"""Characters of a value in a message."""


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


OPTIONAL: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "row": ("a number", lambda value: isinstance(value, int)),
    "sample": ("a number", lambda value: isinstance(value, int)),
    "messages": ("a list of messages", partial(_are, dict)),
    "prompt_tokens": ("a list of token ids", partial(_are, int)),
    "tokens": ("a list of token ids", partial(_are, int)),
    "stop_reason": (f"one of {', '.join(StopReason)}", lambda value: value in list(StopReason)),
    "model": ("a name", lambda value: isinstance(value, str)),
    "datasource": ("a name", lambda value: isinstance(value, str)),
    "metadata": ("an object", lambda value: isinstance(value, dict)),
}
"""Parts of a row that one of other origin may lack, what each is, and whether a value is that."""


def reply_row(reply: Reply, *, model: str, logprobs: bool) -> Row:
    """Returns a reply as a row; what JSON cannot hold of the data set's own row (pictures, dates) is left out."""
    prompt = reply.prompt
    row: Row = {
        "row": reply.row,
        "sample": reply.sample,
        "prompt": prompt.text,
        "messages": list(prompt.messages),
        "completion": reply.completion,
        "prompt_tokens": list(prompt.token_ids),
        "tokens": list(reply.token_ids),
        "logprobs": list(reply.logprobs),
        "stop_reason": str(reply.stop_reason),
        "model": model,
        "seed": reply.seed,
        "label": prompt.label if _is_json(prompt.label) else str(prompt.label),
        "datasource": prompt.datasource,
        "metadata": {name: value for name, value in prompt.metadata.items() if _is_json(value)},
    }
    if not logprobs:
        del row["logprobs"]
    return row


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """Returns the prompt of a row."""
    return Prompt(
        token_ids=tuple(row.get("prompt_tokens", ())),
        text=row["prompt"],
        label=row.get("label"),
        datasource=row.get("datasource", "default"),
        metadata=row.get("metadata", {}),
        messages=tuple(row.get("messages", ())),
    )


def description_path(path: Path) -> Path:
    """Returns the file with the description of a file of rows."""
    return path.with_name(f"{path.name}.json")


def read_description(path: Path) -> dict[str, Any] | None:
    """Returns the description of a file of rows; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    beside = description_path(path)
    try:
        description = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{beside} cannot be read ({error}): remove it together with {path.name}.") from error
    if not isinstance(description, dict):
        raise DataError(f"{beside} holds no description: remove it together with {path.name}.")
    return description


def read_rows(path: Path, *, flag: str) -> Iterator[Row]:
    """Yields the rows of a file of replies, each with its `row` and `sample`: by default, the number of its line and
    0. Null stands for a value that is not there. An incomplete last line, which a killed process left or another is
    writing, is left out.

    Raises:
        DataError: the file cannot be read, or a line is no reply; the first such line is named.
    """
    seen: set[Key] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and not _whole(line):
                    break
                if not line.strip():
                    continue
                where = f"Line {number} of {path}"
                row = _reply(_parsed(line, where), number - 1, where, flag)
                if (key := _key(row, where)) in seen:
                    raise DataError(f"{where} is again sample {key[1]} of row {key[0]}: remove one of them.")
                seen.add(key)
                yield row
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check {flag}.") from error


def _reply(row: Row, number: int, where: str, flag: str) -> Row:
    """Returns a row, by default of this number.

    Raises:
        DataError: it is no reply.
    """
    row = {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}
    for name in ("prompt", "completion"):
        if not isinstance(row.get(name), str):
            raise DataError(
                f"{where} has no text {name!r}: {flag} takes rows with prompt and completion, as `rollgrad generate` "
                "writes them."
            )
    for name, (kind, holds) in OPTIONAL.items():
        if name in row and not holds(row[name]):
            raise DataError(f"{where} has the {name} {_shown(row[name])}, which is not {kind}: leave it out.")
    return {"row": number, "sample": 0, **row}


class RowLog:
    """A file of rows that is written; `done` has the keys of its rows."""

    def __init__(self, path: Path, done: set[Key]) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._pending: list[bytes] = []
        self._written_at = time.monotonic()
        self.done = done

    def add(self, rows: Iterable[Row]) -> None:
        """Appends rows, which are on the disk soon.

        Raises:
            CheckpointError: they cannot be written.
        """
        for row in rows:
            self._pending.append(_line(row))
            self.done.add((row["row"], row["sample"]))
        if len(self._pending) >= CHUNK_ROWS or time.monotonic() - self._written_at >= CHUNK_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Waits until all rows are on the disk.

        Raises:
            CheckpointError: they cannot be written.
        """
        text = b"".join(self._pending)
        self._pending.clear()
        try:
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                if self._file.write(piece) != len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # the next start removes an incomplete line, too
                self._file.truncate(self._size)
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror or error}): make room there, and start again."
            ) from error
        self._size += len(text)
        self._written_at = time.monotonic()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()


@contextmanager
def row_log(path: Path, description: Mapping[str, Any], *, flag: str) -> Iterator[RowLog]:
    """Opens a file of rows for more of them. `description` says what the rows depend on; `flag` names the file.

    Raises:
        CheckpointError: the file holds rows of another description, or none of ours; another process writes it; or it
            cannot be written.
        DataError: one of its lines is broken.
    """
    if path.is_dir():
        raise CheckpointError(f"{flag} is {str(path)!r}, a directory: name a file in it.")
    with locked(path.parent, flag, file=f".{path.name}.lock"):
        try:
            holds = path.exists() and path.stat().st_size > 0
            if holds:
                _check_same(path, description, flag)
                done = _repaired(path)
            else:
                replace_file(description_path(path), (json.dumps(description, indent=2) + "\n").encode())
                done = set()
            rows = RowLog(path, done)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or error}): choose another {flag}."
            ) from error
        try:
            yield rows
        finally:
            rows.close()


def _check_same(path: Path, description: Mapping[str, Any], flag: str) -> None:
    begun = read_description(path)
    if begun is None:
        raise CheckpointError(
            f"{path} is there already, and {description_path(path).name} beside it, which would say what wrote it, is "
            f"not: choose another {flag}."
        )
    now = json.loads(json.dumps(description))
    differ = [
        f"{name} ({_shown(begun.get(name))}, now {_shown(now.get(name))})"
        for name in dict.fromkeys((*begun, *now))
        if begun.get(name) != now.get(name)
    ]
    if differ:
        raise CheckpointError(
            f"{path} holds rows of other settings, which differ in {', '.join(differ)}: set them back to continue it, "
            f"remove it, or choose another {flag}."
        )


def _repaired(path: Path) -> set[Key]:
    """Removes an incomplete last line; returns the keys of all others."""
    done: set[Key] = set()
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                log.warning("an incomplete last line is removed: its reply is made again", file=str(path), line=number)
                break
            where = f"Line {number} of {path}"
            done.add(_key(_parsed(line, where), where))
            whole += len(line)
    os.truncate(path, whole)
    return done


def _whole(line: bytes) -> bool:
    """Returns whether a last line without an end is a whole row."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}): remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object: remove the line.")
    return row


def _key(row: Mapping[str, Any], where: str) -> Key:
    key = row.get("row"), row.get("sample")
    if not all(isinstance(number, int) for number in key):
        raise DataError(f"{where} has no numbers row and sample: remove the line.")
    return key  # type: ignore[return-value] # checked above


def _line(row: Row) -> bytes:
    try:
        return f"{json.dumps(row, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a data set may hold
        return f"{json.dumps(row)}\n".encode()


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def rows_text(rows: Iterable[Row]) -> bytes:
    """Returns rows as the content of a file."""
    return b"".join(map(_line, rows))
