"""States of trained modules in files: written by some processes, read by others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.torch.optimizers import stored_state
from rollgrad.adapters.models.torch.optimizers.stored_state import (
    StoredTensor,
    opened,
    whole_tensor,
    write_parts,
    write_state,
)
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import STORED_IN

STATE: dict[str, Any] = {
    "steps": 3,
    "loss_scale": {"factor": 4.0, "well": 1},
    "masters": {"a.weight": torch.arange(10.0).view(5, 2), "a.bias": torch.ones(1)},
    "averages": {"a.weight": torch.arange(10.0, 20.0).view(5, 2), "a.bias": torch.zeros(1)},
    "moments": {"a.weight": {"step": torch.tensor(3.0), "exp_avg": torch.rand(5, 2)}, "a.bias": {}},
}


def divided(directory: Path, parts: int) -> None:
    """Rows as FSDP2 deals them out; of the bias all but one process have none."""
    for rank in range(parts):

        def mine(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return tensor if tensor.ndim == 0 else tensor[start(len(tensor), rank) : start(len(tensor), rank + 1)]

        def start(count: int, rank: int) -> int:
            return min(count, rank * -(-count // parts))

        state = STATE | {
            section: {n: mine(t) for n, t in STATE[section].items()} for section in ("masters", "averages")
        }
        moments = {key: mine(t) for key, t in STATE["moments"]["a.weight"].items() if t.ndim or rank == 0}
        state["moments"] = {"a.weight": moments, "a.bias": {}}
        write_state(state, directory / f"{rank}.safetensors", {"a.weight": (start(5, rank), 5), "a.bias": (0, 1)})


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_what_processes_wrote_is_read_whole_or_in_any_other_rows(tmp_path: Path, parts: int) -> None:
    divided(tmp_path, parts)
    found = opened({STORED_IN: str(tmp_path)})
    assert {key: found[key] for key in ("steps", "loss_scale")} == {key: STATE[key] for key in ("steps", "loss_scale")}
    for section in ("masters", "averages"):
        assert found[section].keys() == STATE[section].keys()
        for name, tensor in STATE[section].items():
            stored = found[section][name]
            assert (stored.shape, stored.numel()) == (tensor.shape, tensor.numel())
            assert torch.equal(whole_tensor(stored), tensor)
            for first in range(len(tensor) + 1):
                for last in range(first, len(tensor) + 1):
                    assert torch.equal(stored.rows(first, last), tensor[first:last])
    moments = found["moments"]["a.weight"]
    assert all(torch.equal(whole_tensor(moments[key]), t) for key, t in STATE["moments"]["a.weight"].items())
    assert isinstance(moments["step"], StoredTensor)
    assert moments["step"].shape == torch.Size([])


def parameters() -> Iterator[dict[str, Any]]:
    """The state, a parameter at a time."""
    for name in STATE["masters"]:
        yield {section: {name: STATE[section][name]} for section in ("masters", "averages", "moments")}


def test_a_state_in_several_files_is_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {key: STATE[key] for key in ("steps", "loss_scale")}
    monkeypatch.setattr(stored_state, "FILE_BYTES", 1)
    write_parts(numbers, parameters(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "no more than one parameter is in memory"
    found = opened({STORED_IN: str(tmp_path)})
    assert {key: found[key] for key in numbers} == numbers
    for section in ("masters", "averages"):
        assert found[section].keys() == STATE[section].keys()
        assert all(torch.equal(whole_tensor(found[section][n]), t) for n, t in STATE[section].items())
    moments = found["moments"]["a.weight"]
    assert all(torch.equal(whole_tensor(moments[key]), t) for key, t in STATE["moments"]["a.weight"].items())


def test_what_other_processes_have_a_part_of_is_gone_through_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for the one that writes, which has no room."""
    monkeypatch.setattr(stored_state, "FILE_BYTES", 1)
    parts = parameters()
    with pytest.raises(CheckpointError, match=r"cannot be written"):
        write_parts({"steps": 3}, parts, tmp_path / "gone")
    assert next(parts, None) is None


def test_a_lost_file_and_a_foreign_one_are_told(tmp_path: Path) -> None:
    divided(tmp_path, 3)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"3 of 5 rows of (averages|masters|moments)/a\.weight"):
        opened({STORED_IN: str(tmp_path)})
    (tmp_path / "1.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened({STORED_IN: str(tmp_path)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened({STORED_IN: str(tmp_path / "gone")})


def test_a_directory_that_other_machines_do_not_see_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not on a file system that all machines share.*--ckpt\.state_dir"):
        write_state(STATE, tmp_path / "elsewhere" / "0.safetensors")
