"""Files of weights that a copy left incomplete are found by their sizes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgrad.adapters.checkpoints.weight_files import tensor_shapes, weights_problem


def write(directory: Path, *, shards: int) -> list[Path]:
    """Saves weights in one file, or in as many as there are `shards`, with their index."""
    import torch
    from safetensors.torch import save_file

    names = [f"model-{number}.safetensors" for number in range(shards)] or ["model.safetensors"]
    for name in names:
        save_file({f"{name}.weight": torch.ones(40, 40)}, directory / name, metadata={"format": "pt"})
    if shards:
        index = {"weight_map": {f"{name}.weight": name for name in names}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return [directory / name for name in names]


@pytest.mark.parametrize("shards", [0, 3])
def test_what_safetensors_wrote_is_whole(tmp_path: Path, shards: int) -> None:
    write(tmp_path, shards=shards)
    assert weights_problem(tmp_path) is None
    assert {*tensor_shapes(tmp_path).values()} == {(40, 40)}
    assert len(tensor_shapes(tmp_path)) == max(shards, 1)


def test_of_other_formats_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cut")
    assert weights_problem(tmp_path) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7000\n")


def other(file: Path) -> None:
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is cut off"),
        (cut_in_header, "is cut off"),
        (emptied, "is cut off"),
        (pointer, "git lfs pull"),
        (other, "is no safetensors file"),
    ],
)
@pytest.mark.parametrize("shards", [0, 3])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], said: str, shards: int) -> None:
    file = write(tmp_path, shards=shards)[-1]
    damage(file)
    problem = weights_problem(tmp_path)
    assert said in str(problem)
    assert file.name in str(problem)
    assert tensor_shapes(tmp_path) == {}


def test_files_that_are_not_there_are_counted(tmp_path: Path) -> None:
    files = write(tmp_path, shards=4)
    files[1].unlink()
    assert "lacks model-1.safetensors of the 4 files" in str(weights_problem(tmp_path))
    files[3].unlink()
    assert "lacks model-1.safetensors and 1 more of the 4 files" in str(weights_problem(tmp_path))


def test_a_broken_index_is_said(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is broken" in str(weights_problem(tmp_path))
