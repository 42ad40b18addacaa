"""Training states: read only if they are, to the bit, what was written; else the one before is read, and said."""

import json
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.checkpoints.states import FORMAT, FORMAT_WITH_PARTS, load_description, read_state
from rollgrad.application.pipelines.state_writing import StateWriter
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import STORED_IN, TrainingState

FILES = ("state.pt", "description.json", "manifest.json")
FLIPS = 40
"""Bits that are flipped in each file, spread over it."""


def state(step: int) -> TrainingState:
    tensors = {"masters": {"a": torch.full((50, 3), float(step))}, "moments": {}, "steps": step}
    return TrainingState(
        step=step,
        state={"run": {"step": step}, "update": {"policy": tensors}, "before": {"eval/pass@1": 0.5}},
        description={"settings": {"train.seed": 1, "agent.system_prompt": "é\u2028"}, "versions": {}, "data": None},
    )


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """The directory of a run with states of steps 2 and 4."""
    store = LocalCheckpointStore(tmp_path)
    for step in (2, 4):
        store.save_training(state(step))
    return tmp_path


def loaded(directory: Path) -> int:
    found = LocalCheckpointStore(directory).load_training()
    assert found is not None
    assert float(found.state["update"]["policy"]["masters"]["a"].mean()) == found.step
    return found.step


def states(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("training_state*"))


def falls_back(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Warnings when the state of step 4 is broken and that of step 2 is used."""
    capsys.readouterr()
    assert loaded(directory) == 2
    said = capsys.readouterr().out
    assert "training_state_4" in said
    assert "training_state_2" in said
    assert "Traceback" not in said
    return said


class Elsewhere:
    """A part of a state that writes itself."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def write_files(self, directory: Path) -> None:
        for rank in range(2):
            (directory / f"{rank}.safetensors").write_bytes(self.content)

    def copied(self) -> "Elsewhere":
        return Elsewhere(self.content)


def test_parts_in_files_are_part_of_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of their files, and no others."""
    store = LocalCheckpointStore(tmp_path)
    for step in (2, 4):
        update = {"policy": Elsewhere(b"p"), "critic": Elsewhere(b"c"), "shuffle": torch.ones(1)}
        store.save_training(evolve(state(step), state={"run": {"step": step}, "update": update, "before": {}}))

    def newest() -> int:
        found = LocalCheckpointStore(tmp_path).load_training()
        assert found is not None
        parts = {name: Path(part[STORED_IN]) for name, part in found.state["update"].items() if name != "shuffle"}
        assert parts == {name: tmp_path / f"training_state_{found.step}" / f"update.{name}" for name in parts}
        assert [file.read_bytes() for file in sorted(parts["critic"].iterdir())] == [b"c", b"c"]
        return found.step

    assert newest() == 4
    part = tmp_path / "training_state_4" / "update.policy"
    for name, content in (("0.safetensors", b"q"), ("2.safetensors", b"p")):
        (part / name).write_bytes(content)
        assert newest() == 2
        assert f"update.policy/{name}" in capsys.readouterr().out
        (part / "0.safetensors").write_bytes(b"p")
    (part / "2.safetensors").unlink()
    assert newest() == 4
    shutil.rmtree(part)
    assert newest() == 2


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(name: str, two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = two / "training_state_4" / name
    whole = file.read_bytes()
    bits = random.Random(0).sample(range(8 * len(whole)), FLIPS)
    for bit in bits:
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        falls_back(two, capsys)
    file.write_bytes(whole)
    assert loaded(two) == 4


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, 50, -1])
def test_a_file_that_was_cut_off_is_found(name: str, size: int, two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = two / "training_state_4" / name
    file.write_bytes(file.read_bytes()[:size])
    falls_back(two, capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_of_another_state_is_found(
    name: str, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = two / "training_state_4" / name
    if name != "description.json":  # of one run, all states have the same one
        shutil.copy(two / "training_state_2" / name, file)
        falls_back(two, capsys)
    file.unlink()
    assert "cannot be read" in falls_back(two, capsys)
    file.mkdir()
    falls_back(two, capsys)


def test_a_state_that_was_renamed_is_found(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(two / "training_state_4")
    shutil.copytree(two / "training_state_2", two / "training_state_4")
    assert "the state of step 2, renamed" in falls_back(two, capsys)


def rewritten(path: Path, **changes: Any) -> None:
    """Changes the manifest of a state, with a hash that is right."""
    from rollgrad.adapters.checkpoints.states import _manifest_hash

    content = json.loads((path / "manifest.json").read_text())["content"] | changes
    (path / "manifest.json").write_text(json.dumps({"content": content, "sha256": _manifest_hash(content)}))


def test_a_state_of_a_later_version_is_refused_and_kept(two: Path) -> None:
    """An older one in its place would let a newer run be lost."""
    rewritten(two / "training_state_4", format=FORMAT_WITH_PARTS + 1)
    with pytest.raises(
        CheckpointError, match=rf"training_state_4 has format {FORMAT_WITH_PARTS + 1}, .* reads {FORMAT} and"
    ):
        LocalCheckpointStore(two).load_training()
    assert states(two) == ["training_state_2", "training_state_4"]


def as_torch(value: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch bomb",)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "text": lambda path: path.write_text("notes\n"),
    "json": lambda path: path.write_text('{"run": {"step": 3}}'),
    "list": as_torch([1, 2]),
    "number": as_torch(7),
    "tensor": as_torch(torch.zeros(3)),
    "dict": as_torch({}),
    "no_run": as_torch({"update": {}, "before": {}}),
    "run_is_text": as_torch({"run": "x", "update": {}, "before": {}}),
    "no_step": as_torch({"run": {}, "update": {}, "before": {}}),
    "step_is_text": as_torch({"run": {"step": "three"}, "update": {}, "before": {}}),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"run": {"step": 1}})),
    "bomb": as_torch({"run": Bomb(), "update": {}, "before": {}}),
    "pickle_bomb": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "deep": lambda path: path.write_bytes(b"(" * 100_000),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("name", ["training_state.pt", "training_state_4/state.pt"])
def test_a_foreign_file_is_one_sentence(
    write: Callable[[Path], Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that a manifest vouches for; torch's advice to unpickle whatever comes is not passed on."""
    monkeypatch.chdir(tmp_path)
    store = LocalCheckpointStore(tmp_path)
    if "/" in name:
        store.save_training(state(4))
    write(tmp_path / name)
    if "/" in name:
        from rollgrad.adapters.checkpoints.states import _sha256

        known = json.loads((tmp_path / "training_state_4/manifest.json").read_text())["content"]["sha256"]
        rewritten(tmp_path / "training_state_4", sha256=known | {"state.pt": _sha256((tmp_path / name).read_bytes())})
        if write in (FOREIGN["no_step"], FOREIGN["step_is_text"]):
            return  # the manifest has the step
    with pytest.raises(CheckpointError, match=r"^No training state in .* can be used \(.*training_state") as caught:
        store.load_training()
    assert "weights_only" not in str(caught.value)
    assert "--ckpt.overwrite" not in str(caught.value), "it would remove the models"
    assert "\n" not in str(caught.value)
    assert not Path("bomb").exists()


def test_a_state_of_an_earlier_version_is_read_and_replaced(tmp_path: Path) -> None:
    old = tmp_path / "training_state.pt"
    torch.save(state(3).state, old)
    store = LocalCheckpointStore(tmp_path)
    found = store.load_training()
    assert found is not None
    assert (found.step, found.description) == (3, None)
    whole = old.read_bytes()
    middle = len(whole) // 2
    old.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointError, match=r"training_state\.pt is not what was written|no training state"):
        store.load_training()
    old.write_bytes(whole)
    store.save_training(state(4))
    assert states(tmp_path) == ["training_state.pt", "training_state_4"]
    store.save_training(state(5))
    assert states(tmp_path) == ["training_state_4", "training_state_5"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_states_are_kept(keep: int, tmp_path: Path) -> None:
    store = LocalCheckpointStore(tmp_path, keep_states=keep)
    for step in range(8, 13):  # also where names sort otherwise
        store.save_training(state(step))
        assert loaded(tmp_path) == step
    assert {path.name for path in tmp_path.iterdir()} == {f"training_state_{step}" for step in range(13 - keep, 13)}


@pytest.mark.parametrize("keep", [1, 2])
def test_after_a_broken_state_the_states_of_the_course_taken_are_kept(keep: int, two: Path) -> None:
    (two / "training_state_4" / "state.pt").write_bytes(b"")
    store = LocalCheckpointStore(two, keep_states=keep)
    store.save_training(state(3))
    assert states(two) == ["training_state_2", "training_state_3"][2 - keep :]


def test_the_same_step_may_be_saved_again(two: Path) -> None:
    LocalCheckpointStore(two).save_training(state(4))
    assert states(two) == ["training_state_2", "training_state_4"]
    assert loaded(two) == 4


@pytest.mark.parametrize("operation", range(1, 8))
def test_a_run_that_is_killed_while_a_state_is_written_in_the_background_has_the_one_before(
    operation: int, two: Path
) -> None:
    """Whichever flush or rename it had reached; the last of them is after the new state has its name."""
    child = os.fork()
    if not child:
        try:
            done = iter(range(1, operation))
            real = {name: getattr(os, name) for name in ("fsync", "rename")}

            def counted(name: str) -> Callable[..., Any]:
                def perform(*arguments: Any) -> Any:
                    if next(done, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real[name](*arguments)

                return perform

            writer = StateWriter(LocalCheckpointStore(two), required=True)
            for name in real:
                setattr(os, name, counted(name))
            writer.begin(state(6))
            writer.finish()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (operation < 7)
    assert loaded(two) == (4 if operation < 6 else 6)
    assert len(states(two)) >= 2


def test_a_disk_that_fills_leaves_the_older_states(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every file, wherever its writing breaks off."""
    store = LocalCheckpointStore(two)
    for name in FILES:
        opened = Path.open

        def full(self: Path, mode: str = "r", *rest: Any, broken: str = name, open_: Any = opened, **more: Any) -> Any:
            file = open_(self, mode, *rest, **more)
            if self.name == broken and "w" in mode:
                file.close()
                return open_(Path("/dev/full"), mode, *rest, **more)
            return file

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device.*state_minutes"):
            store.save_training(state(6))
        monkeypatch.undo()
        assert sorted(path.name for path in two.iterdir()) == ["training_state_2", "training_state_4"]
        assert loaded(two) == 4


def test_what_is_written_is_flushed_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and its directory, before the rename that makes them the state; and that rename, after it."""
    done: list[str] = []
    flush, rename = os.fsync, Path.rename

    def noted_flush(descriptor: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        flush(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return rename(self, target)

    store = LocalCheckpointStore(tmp_path)
    monkeypatch.setattr(os, "fsync", noted_flush)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store.save_training(state(1))
    fresh = ".training_state_1.new"
    assert set(done[:3]) == {f"flush {name}" for name in FILES}
    assert done[3:] == [f"flush {fresh}", f"rename {fresh}", f"flush {tmp_path.name}"]


def test_what_a_killed_run_left_half_written_is_removed(two: Path) -> None:
    shutil.copytree(two / "training_state_2", two / ".training_state_6.new")
    (two / "training_state_4").rename(two / ".training_state_4.old")
    (two / ".step_3.new").mkdir()
    (two / ".model.state.json.new").touch()
    (two / ".notes.new").touch()
    assert loaded(two) == 4
    assert sorted(path.name for path in two.iterdir()) == [".notes.new", "training_state_2", "training_state_4"]


def test_a_description_is_read_without_the_tensors(two: Path) -> None:
    (two / "training_state_4" / "state.pt").unlink()
    assert load_description(two) == state(4).description
    with pytest.raises(CheckpointError, match=r"state\.pt of training_state_4 cannot be read"):
        read_state(two / "training_state_4")
