"""Training states in a directory: `training_state_N/` after step N, the newest few of them.

A state is `state.pt` (tensors), `description.json` (the run that it is of) and `manifest.json`, which has the format's
version and the sha256 of the others and of itself. Parts that other processes hold (`PartInFiles`) are files of theirs
in directories named after the part's place in the state. Invariants: a state is read only if it is, to the bit, what
was written as the state of that step; one that is not is named, and the one before is read. Does not own: what a state
consists of.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rollgrad.adapters.checkpoints.files import replace_directory, size_of
from rollgrad.adapters.checkpoints.names import OLD_TRAINING_STATE, TRAINING_STATE, numbered, state_paths
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import STORED_IN, PartInFiles, TrainingState

Read = TypeVar("Read")

FORMAT = 1
"""Version of what a state's directory holds."""
FORMAT_WITH_PARTS = 2
"""Version of a directory in which parts of the state are directories of files."""

STATE_FILE, DESCRIPTION_FILE, MANIFEST_FILE = "state.pt", "description.json", "manifest.json"
PARTS = {"run", "update", "before"}
"""Keys that every state has."""


class BrokenStateError(CheckpointError):
    """A training state is not what was written; the message says which, and how it shows."""


def save_state(directory: Path, saved: TrainingState, *, keep: int) -> Path:
    """Writes `directory/training_state_N`, and removes what is not one of the newest `keep` states up to it; returns
    its path. Later ones are of a course that the run was set back from.

    Raises:
        OSError, RuntimeError: it cannot be written; the older ones are then still there.
    """
    target = directory / f"{TRAINING_STATE}{saved.step}"

    def fill(fresh: Path) -> None:
        fresh.mkdir()
        description = json.dumps(saved.description).encode()
        (fresh / DESCRIPTION_FILE).write_bytes(description)
        state = _with_parts_written(saved.state, fresh, "")
        parts = {file.relative_to(fresh).as_posix(): _hash_of(file) for file in sorted(fresh.glob("*/*"))}
        files = {STATE_FILE: _save_tensors(state, fresh / STATE_FILE), DESCRIPTION_FILE: _sha256(description), **parts}
        content = {"format": FORMAT_WITH_PARTS if parts else FORMAT, "step": saved.step, "sha256": files}
        (fresh / MANIFEST_FILE).write_text(json.dumps({"content": content, "sha256": _manifest_hash(content)}))

    replace_directory(target, fill)
    before = [path for step, path in numbered(directory, TRAINING_STATE) if step < saved.step]
    kept = {target, *before[: keep - 1]}
    for path in state_paths(directory):
        if path.is_dir() and path not in kept:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and len(kept) >= keep:
            path.unlink(missing_ok=True)
    return target


def state_bytes(directory: Path, saved: TrainingState) -> int | None:
    """Returns about as many bytes as a state takes: those of its tensors or, where other processes hold some, those of
    the newest in the directory; None without any."""
    found = _tensor_bytes(saved.state)
    if found is not None:
        return found
    newest = [path for _, path in numbered(directory, TRAINING_STATE)][:1]
    return size_of(newest[0]) if newest else None


def _tensor_bytes(value: Any) -> int | None:
    """Returns the bytes of all tensors in a part of a state; None if other processes hold some."""
    if isinstance(value, PartInFiles):
        return None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    sizes = [_tensor_bytes(part) for part in parts]
    return None if None in sizes else int(getattr(value, "nbytes", 0)) + sum(size or 0 for size in sizes)


def load_state(directory: Path) -> TrainingState | None:
    """Returns the newest state that is whole, None without any; broken ones are reported.

    Raises:
        CheckpointError: all are broken, or one is of a later version.
    """
    return _newest(directory, read_state)


def load_description(directory: Path) -> Mapping[str, Any] | None:
    """Returns the description of the newest state without reading its tensors, None without any, or where an earlier
    version saved it. Fast, and importable without torch.

    Raises:
        CheckpointError: all are broken, or one is of a later version.
    """
    return _newest(
        directory, lambda path: None if path.name == OLD_TRAINING_STATE else _read_description(path, whole=False)
    )


def _newest(directory: Path, read: Callable[[Path], Read]) -> Read | None:
    """Returns the result of `read` for the newest state that is not broken."""
    broken: list[str] = []
    for path in state_paths(directory):
        try:
            found = read(path)
        except BrokenStateError as error:
            broken.append(str(error))
            continue
        if broken:
            import structlog

            structlog.get_logger(__name__).warning(
                "a training state is broken: the one before it is used", broken="; ".join(broken), used=path.name
            )
        return found
    if not broken:
        return None
    raise CheckpointError(
        f"No training state in {directory} can be used ({'; '.join(broken)}): bring back a copy of one, or begin a run "
        "with another --ckpt.output_dir, whose --actor.model_name_or_path may be the last model that this one saved."
    )


def read_state(path: Path) -> TrainingState:
    """Returns the state at `path`; nothing but data is unpickled.

    Raises:
        BrokenStateError: it is not what was written.
        CheckpointError: it is of a later version.
    """
    if path.name == OLD_TRAINING_STATE:
        return _read_without_hashes(path)
    description = _read_description(path, whole=True)
    return TrainingState(
        step=int(path.name.removeprefix(TRAINING_STATE)),
        state=_with_parts_found(_unpickled(path, path / STATE_FILE), path),
        description=description,
    )


def _read_description(path: Path, *, whole: bool) -> Mapping[str, Any]:
    """Returns the description of a state whose files are what was written; without `whole` the tensors are not looked
    at."""
    step, files = _manifest(path)
    if path.name != f"{TRAINING_STATE}{step}":
        raise BrokenStateError(f"{path.name} is the state of step {step}, renamed")
    for name in (*files, STATE_FILE) if whole else (DESCRIPTION_FILE,):
        try:
            found = _hash_of(path / name)
        except OSError as error:
            raise BrokenStateError(f"{name} of {path.name} cannot be read: {error.strerror}") from error
        if found != files.get(name):
            raise BrokenStateError(f"{name} of {path.name} is not what was written: its sha256 differs")
    for file in path.glob("*/*") if whole else ():
        if (name := file.relative_to(path).as_posix()) not in files:
            raise BrokenStateError(f"{name} of {path.name} was not written as a part of it")
    description: Mapping[str, Any] = json.loads((path / DESCRIPTION_FILE).read_bytes())
    return description


def _manifest(path: Path) -> tuple[int, Mapping[str, str]]:
    """(the step of a state, the hash of each of its files)."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
        content = manifest["content"]
        whole = manifest["sha256"] == _manifest_hash(content)
    except OSError as error:
        raise BrokenStateError(f"{MANIFEST_FILE} of {path.name} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise BrokenStateError(f"{MANIFEST_FILE} of {path.name} is not what was written")
    if content["format"] not in (FORMAT, FORMAT_WITH_PARTS):
        raise CheckpointError(
            f"The training state {path} has format {content['format']}, but this version of rollgrad reads {FORMAT} "
            f"and {FORMAT_WITH_PARTS}: continue with the version that wrote it."
        )
    return content["step"], content["sha256"]


def _manifest_hash(content: Any) -> str:
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_of(file: Path) -> str:
    """Returns the sha256 of a file, which is never whole in memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _with_parts_written(value: Any, directory: Path, name: str) -> Any:
    """Returns a state in which the names of directories, below `directory`, are in the places of the parts that have
    been written there; `name` is the place of `value`."""
    if isinstance(value, PartInFiles):
        (directory / name).mkdir()
        value.write_files(directory / name)
        return {STORED_IN: name}
    if isinstance(value, Mapping):
        return {key: _with_parts_written(each, directory, f"{name}.{key}".strip(".")) for key, each in value.items()}
    return value


def _with_parts_found(value: Any, path: Path) -> Any:
    """Returns the state at `path` with whole paths in the places of such names."""
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {STORED_IN}:
        if not (path / Path(str(value[STORED_IN])).name).is_dir():
            raise BrokenStateError(f"{path.name} has lost its directory {value[STORED_IN]}")
        return {STORED_IN: str((path / Path(str(value[STORED_IN])).name).resolve())}
    return {key: _with_parts_found(each, path) for key, each in value.items()}


class HashedFile:
    """A file as `torch.save` writes it, hashed on the way. An error is kept: raised into torch's writer, it would end
    the process."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of `data`, bytes or what is laid out like them."""
        if self.error is None:
            try:
                self._file.write(data)
                self.hash.update(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Leaves that to the file."""


def _save_tensors(state: Mapping[str, Any], path: Path) -> str:
    """Writes the file `path`; returns its sha256."""
    import torch

    with path.open("wb") as file:
        hashed = HashedFile(file)
        torch.save(dict(state), hashed)  # type: ignore[arg-type]
        if hashed.error is not None:
            raise hashed.error
    return hashed.hash.hexdigest()


def _unpickled(state: Path, file: Path) -> Mapping[str, Any]:
    """Returns the content of a file, if that is a state; errors name `state`."""
    import torch

    try:
        # On the CPU, wherever it was: what continues from it copies it to its own devices.
        found = torch.load(file, weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # a foreign file fails in as many ways as there are bytes in it
        raise BrokenStateError(f"{state.name} is no training state of rollgrad ({type(error).__name__})") from error
    if not isinstance(found, Mapping) or not found.keys() >= PARTS or not isinstance(found["run"], Mapping):
        raise BrokenStateError(f"{state.name} is no training state of rollgrad: it has other parts")
    return found


def _read_without_hashes(path: Path) -> TrainingState:
    """Returns a state without hashes; the archive that torch writes has checksums of its own, which torch does not look
    at."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError as error:
        raise BrokenStateError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # as above
        raise BrokenStateError(f"{path.name} is no training state of rollgrad ({type(error).__name__})") from error
    if damaged is not None:
        raise BrokenStateError(f"{path.name} is not what was written: the checksum of {damaged} differs")
    state = _unpickled(path, path)
    step = state["run"].get("step")
    if not isinstance(step, int):
        raise BrokenStateError(f"{path.name} is no training state of rollgrad: it has no step")
    return TrainingState(step=step, state=state, description=None)
