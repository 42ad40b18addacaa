"""Checkpoints of the Tinker API on the disk, whose writing may break off at any moment."""

from pathlib import Path

import pytest

from rollgrad.adapters.servers.tinker.shelf import STATE, Description, Shelf
from rollgrad.domain.errors import CheckpointError

OF = Description(base_model="tiny", lora_rank=4, user_metadata={})


def test_a_write_that_was_killed_before_its_end_hinders_no_later_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "saved", tmp_path)

    def write(text: str) -> str:
        return shelf.write("a:train:0", STATE, "last", OF, lambda place: _fill(place, text), overwrite=True)

    path = write("first")
    place, _ = shelf.find(path, STATE)
    _fill(place.with_name(".last.old"), "what was there before")
    assert write("second") == path
    assert (place / "text").read_text() == "second"
    assert [found.name for found in place.parent.iterdir()] == ["last"]


def full(place: Path) -> None:
    """Fills the disk by half of a checkpoint, as the writers of models tell it."""
    _fill(place, "half")
    raise CheckpointError("It cannot be written: choose another --ckpt.output_dir.") from OSError("No space left")


def test_a_disk_without_room_is_told_by_what_clients_know_and_keeps_no_half(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "saved", tmp_path / "snapshots")
    with pytest.raises(CheckpointError, match=r"last \(No space left\): make room there\.$"):
        shelf.write("a:train:0", STATE, "last", OF, full, overwrite=True)
    with pytest.raises(CheckpointError, match=r"\(No space left\): make room there, or .* TMPDIR"):
        shelf.snapshot("a:sample:0", full)
    assert not [*tmp_path.rglob("text")]


def _fill(place: Path, text: str) -> None:
    place.mkdir(exist_ok=True)
    (place / "text").write_text(text)
