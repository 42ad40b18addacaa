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


def test_a_sampler_without_room_is_told_where_it_lacks(tmp_path: Path) -> None:
    def full(place: Path) -> None:
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match="TMPDIR"):
        Shelf(tmp_path, tmp_path).snapshot("a:sample:0", full)


def _fill(place: Path, text: str) -> None:
    place.mkdir(exist_ok=True)
    (place / "text").write_text(text)
