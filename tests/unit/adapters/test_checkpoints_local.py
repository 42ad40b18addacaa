"""LocalCheckpointStore: complete or absent, and the older one until the newer is whole."""

import errno
import os
import re
import shutil
import stat
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from rollgrad.adapters.checkpoints import files, local
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.data.reply_log import RowLog
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.domain.ports.models import PolicyModel


class Policy:
    """Saves `text` in two files and looks on, between them, at what can be seen under the final name."""

    def __init__(self, text: str, final: Path, error: BaseException | None = None) -> None:
        self._text = text
        self._final = final
        self._error = error
        self.seen: list[str] = []

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "one").write_text(self._text)
        self.seen = sorted(file.read_text() for file in self._final.glob("*"))
        if self._error is not None:
            raise self._error
        (path / "two").write_text(self._text)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, where models go that cannot be written to their own."""
    path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def save(store: LocalCheckpointStore, policy: Policy) -> Path:
    return store.save_model(cast("PolicyModel", policy), "model")


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def test_while_a_model_is_written_its_name_stands_for_the_older_one(tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path)
    first, second = Policy("a", tmp_path / "model"), Policy("b", tmp_path / "model")
    save(store, first)
    save(store, second)
    assert first.seen == []
    assert second.seen == ["a", "a"]
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["b", "b"]
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_leaves_the_older_model(error: BaseException, tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        save(store, Policy("b", tmp_path / "model", error))
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["a", "a"]
    assert visible(tmp_path) == ["model"]
    save(LocalCheckpointStore(tmp_path), Policy("c", tmp_path / "model"))
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["c", "c"]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "make room there, or choose another --ckpt.output_dir"),
        (errno.EDQUOT, "your quota there is used up"),
        (errno.EROFS, "it is mounted for reading only"),
        (errno.EIO, "the disk, or the way to it, fails"),
        (errno.EACCES, "let it be written, or choose another"),
        (errno.ENAMETOOLONG, "make room there and let it be written"),
    ],
)
def test_what_lets_a_model_be_written_depends_on_what_the_system_says(number: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"({os.strerror(number)}): {says}")):
        save(LocalCheckpointStore(tmp_path), Policy("a", tmp_path / "model", OSError(number, os.strerror(number))))


def test_a_save_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Large(Policy):
        def save(self, path: Path) -> None:
            time.sleep(0.3)
            super().save(path)

    monkeypatch.setattr(local, "waiting_for", partial(waiting_for, after=0.02))
    with capture_logs() as logs:
        save(LocalCheckpointStore(tmp_path), Large("a", tmp_path / "model"))
    events = [line["event"] for line in logs]
    assert events[0] == "waiting for the model 'model' to be saved (no deadline)"
    assert events[-1].startswith("done waiting for the model 'model' to be saved")


def test_what_is_worth_less_makes_room_for_a_model_and_a_state(tmp_path: Path) -> None:
    """A disk on which a checkpoint has room once `spare` keeps nothing."""
    spared: list[float] = []

    class Full(Policy):
        def save(self, path: Path) -> None:
            if 0.0 not in spared:  # as policies and processes tell it
                raise CheckpointError("The model cannot be written (I/O error: No space left on device (os error 28)).")
            super().save(path)

    def spare(lack: int | None, share: float) -> bool:
        assert lack is None, "nobody knows how much a first model takes"
        spared.append(share)
        return True

    def spend(lack: int | None, share: float) -> bool:
        return False

    with pytest.raises(CheckpointError, match="No space left"):
        save(LocalCheckpointStore(tmp_path, spare=spend), Full("a", tmp_path / "model"))
    save(LocalCheckpointStore(tmp_path, spare=spare), Full("a", tmp_path / "model"))
    assert spared == [0.5, 0.0]
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["a", "a"]


def test_so_much_room_is_made_as_a_state_or_a_model_like_the_one_before_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks: list[int | None] = []

    def spare(lack: int | None, share: float) -> bool:
        lacks.append(lack)
        return False

    disk = os.statvfs(tmp_path)
    empty = SimpleNamespace(f_bfree=3, f_bavail=3, f_frsize=disk.f_frsize)
    full = OSError(28, "No space left on device")
    store = LocalCheckpointStore(tmp_path, spare=spare)
    save(store, Policy("a" * 10**6, tmp_path / "model"))
    monkeypatch.setattr(files.os, "statvfs", lambda path: empty)
    monkeypatch.setattr(local, "save_state", Mock(side_effect=full))
    with pytest.raises(CheckpointError):
        save(store, Policy("b", tmp_path / "model", full))
    weights = {"actor": {"weights": torch.zeros(10**6)}, "many": [torch.zeros(10**5)]}
    with pytest.raises(CheckpointError):
        store.save_training(TrainingState(step=1, state=weights, description=None))
    free = 3 * disk.f_frsize
    assert lacks == [int(1.01 * size) + 2**20 - free for size in (2 * 10**6, 44 * 10**5)]
    empty.f_bfree = empty.f_bavail = 10**9
    with pytest.raises(CheckpointError):
        save(store, Policy("b", tmp_path / "model", full))
    assert lacks[2] is None, "a user's quota is full, and not the disk"
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "training_state_1").mkdir()
    (tmp_path / "training_state_1" / "state.pt").write_bytes(bytes(8 * 10**6))
    empty.f_bfree = empty.f_bavail = 3
    with pytest.raises(CheckpointError):
        save(store, Policy("b", tmp_path / "model", full))
    assert lacks[3] == int(1.01 * 10**6) + 2**20 - free, "a first model takes an eighth of a state at least"


def test_the_model_of_a_runs_end_is_written_elsewhere_rather_than_lost(tmp_path: Path, temporary: Path) -> None:
    class NowhereElse(Policy):
        def save(self, path: Path) -> None:
            if path.is_relative_to(tmp_path / "run"):
                raise CheckpointError("The model cannot be written to /run (Read-only file system).")
            super().save(path)

    store, policy = LocalCheckpointStore(tmp_path / "run"), NowhereElse("a", tmp_path / "run" / "model")
    with pytest.raises(
        CheckpointError, match=r"Read-only file system\)\. What was trained is in .*/rollgrad-"
    ) as raised:
        save(store, policy)
    (written,) = temporary.glob("*/model")
    assert str(written) in str(raised.value)
    assert [path.read_text() for path in written.iterdir()] == ["a", "a"]
    with pytest.raises(CheckpointError, match=r"Read-only file system\)\.$"):
        store.save_model(cast("PolicyModel", policy), "step_3")
    with pytest.raises(CheckpointError, match="No space left"):
        save(store, Policy("a", tmp_path / "run" / "model", OSError(28, "No space left on device")))
    assert [path.parent for path in temporary.glob("*/model")] == [written.parent], "no half of one"


def test_a_model_that_a_process_elsewhere_wrote_is_not_said_to_be_here(tmp_path: Path, temporary: Path) -> None:
    class OfAnotherMachine(Policy):
        def save(self, path: Path) -> None:
            if path.is_relative_to(tmp_path):
                raise CheckpointError("The model cannot be written to /run (Read-only file system).")

    with pytest.raises(CheckpointError, match=r"Read-only file system\)\.$"):
        save(LocalCheckpointStore(tmp_path), OfAnotherMachine("a", tmp_path / "model"))
    assert list(temporary.iterdir()) == []


def test_other_errors_make_no_room(tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path, spare=lambda lack, share: pytest.fail("something was removed"))
    with pytest.raises(CheckpointError):
        save(store, Policy("a", tmp_path / "model", OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="JSON"):
        store.save_state({"a": object()}, "model")


def test_a_model_that_was_being_replaced_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process died between the renames that do it."""
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    rename = Path.rename

    def killed_at_the_second(self: Path, target: Path) -> Path:
        if self.name == ".model.new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(store, Policy("b", tmp_path / "model"))
    monkeypatch.undo()
    assert visible(tmp_path) == []
    store = LocalCheckpointStore(tmp_path)
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["a", "a"]
    save(store, Policy("c", tmp_path / "model"))
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["c", "c"]


def test_a_rename_that_fails_leaves_the_older_model_for_this_very_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    rename = Path.rename

    def refused_once(self: Path, target: Path) -> Path:
        if self.name == ".model.new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused_once)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(store, Policy("b", tmp_path / "model"))
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["a", "a"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def flushed_at_rename(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Files that were on the disk, by the names below its place, when a file or directory was renamed; fills as it
    happens."""
    flushed: set[str] = set()
    found: dict[str, set[str]] = {}
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def record(source: Path, target: Path) -> None:
        inside = {str(Path(name).relative_to(source)) for name in flushed if Path(name).is_relative_to(source)}
        found[Path(target).name] = inside

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", lambda source, target: (record(source, target), replace(source, target)))
    monkeypatch.setattr(Path, "rename", lambda self, target: (record(self, target), rename(self, target))[1])
    return found


def test_what_takes_a_name_is_on_the_disk_before_it_does(
    tmp_path: Path, flushed_at_rename: dict[str, set[str]]
) -> None:
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    assert flushed_at_rename["model"] == {".", "one", "two"}
    store.save_state({"step": 1}, "model")
    assert flushed_at_rename["model.state.json"] == {"."}


def test_errors_of_the_policys_own_pass_through(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^mine$"):
        save(LocalCheckpointStore(tmp_path), Policy("a", tmp_path / "model", CheckpointError("mine")))


def test_state_that_is_not_json_leaves_the_older_state(tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path)
    path = store.save_state({"step": 1}, "model")
    with pytest.raises(CheckpointError, match=r"'model' cannot be written.*set"):
        store.save_state({"step": {2}}, "model")
    assert '"step": 1' in path.read_text()
    assert visible(tmp_path) == ["model.state.json"]


def test_a_directory_that_cannot_be_made_names_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"--ckpt\.output_dir is '.*/file/run'.*Not a directory"):
        LocalCheckpointStore(tmp_path / "file" / "run")


def test_a_directory_that_cannot_be_written_names_its_flag() -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt\.output_dir is '/proc'"):
        LocalCheckpointStore(Path("/proc"))


@pytest.mark.parametrize("place", ["output_dir", "state_dir"])
def test_a_directory_where_none_can_be_renamed_is_refused_at_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a store of objects is mounted; a checkpoint that cannot take its name would show it hours later."""
    rename, refuses = os.rename, tmp_path / place

    def rename_files(source: Path, target: Path) -> None:
        if Path(source).is_relative_to(refuses) and any(Path(source).iterdir()):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_files)
    with pytest.raises(CheckpointError, match=rf"--ckpt\.{place} is '.*/{place}', where directories cannot be renamed"):
        LocalCheckpointStore(tmp_path / "output_dir", tmp_path / "state_dir")
    assert [*refuses.iterdir()] == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_flushes_files_only_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def flush_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush_files)
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    store.save_state({"step": 1}, "model")
    assert visible(tmp_path) == ["model", "model.state.json"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_flushes_nothing_is_written_after_one_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would else lose its model there, hours after it has begun."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    monkeypatch.setattr(files, "_told", False)
    with capture_logs() as logs:
        store = LocalCheckpointStore(tmp_path)
        store.save_state({"step": 1}, "model")
        save(store, Policy("a", tmp_path / "model"))
        RowLog(tmp_path / "replies.jsonl", set()).close()
    assert visible(tmp_path) == ["model", "model.state.json", "replies.jsonl"]
    (line,) = logs
    assert "does not say when files are on the disk" in line["event"]
    assert line["file"] == str(tmp_path / ".model.state.json.new")


def test_a_disk_that_fails_to_flush_keeps_the_older_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalCheckpointStore(tmp_path)
    save(store, Policy("a", tmp_path / "model"))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(store, Policy("b", tmp_path / "model"))
    assert [path.read_text() for path in (tmp_path / "model").iterdir()] == ["a", "a"]


def test_what_a_killed_run_tried_is_removed(tmp_path: Path) -> None:
    for name in (".probe-1.new", "..probe-2.new.new"):
        (tmp_path / name).mkdir()
    LocalCheckpointStore(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 9, 10, 11]), (1, [11]), (3, [9, 10, 11])])
def test_of_the_models_of_steps_the_newest_are_kept_if_asked(keep: int | None, left: list[int], tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path, keep_models=keep)
    (tmp_path / "step_by_step").mkdir()
    for name in ("model", *(f"step_{step}" for step in (1, 2, 9, 10, 11))):
        store.save_model(cast("PolicyModel", Policy("a", tmp_path / name)), name)
        store.save_state({"step": 1}, name)
    expected = {name for step in left for name in (f"step_{step}", f"step_{step}.state.json")}
    assert set(visible(tmp_path)) == expected | {"model", "model.state.json", "step_by_step"}


def test_a_model_that_is_being_removed_when_the_process_ends_is_not_there_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalCheckpointStore(tmp_path, keep_models=1)
    store.save_model(cast("PolicyModel", Policy("a", tmp_path / "step_1")), "step_1")

    def killed(path: Path, **given: Any) -> None:
        if path.exists():
            (path / "one").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save_model(cast("PolicyModel", Policy("b", tmp_path / "step_2")), "step_2")
    assert visible(tmp_path) == ["step_2"]
    LocalCheckpointStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


@pytest.mark.parametrize(("room", "left"), [(None, [1, 2, 3]), (4, [2, 3]), (3, [3]), (1, [3])])
def test_models_of_steps_are_kept_as_far_as_there_is_room(room: int | None, left: list[int], tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path, keep_models_gib=None if room is None else room / 2**30)
    for name in ("model", "step_1", "step_2", "step_3"):
        store.save_model(cast("PolicyModel", Policy("a", tmp_path / name)), name)  # of two bytes
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{step}" for step in left}
    assert (tmp_path / "model").is_dir()
