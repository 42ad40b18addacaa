"""How many cores a container has, and how many threads compute there."""

import os
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.system import cores
from rollgrad.adapters.system.cores import usable_cores
from rollgrad.application.settings.sections.actor import ActorConfig
from rollgrad.entrypoints.composition import models

AFFINE = len(os.sched_getaffinity(0))
LIMITS: dict[str, tuple[dict[str, str], int]] = {
    "none": ({}, AFFINE),
    "version 2": ({"cpu.max": "100000 100000\n"}, 1),
    "version 2, without a limit": ({"cpu.max": "max 100000\n"}, AFFINE),
    "version 1": ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    "version 1, without a limit": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, AFFINE),
    "less than a core": ({"cpu.max": "50000 100000\n"}, 1),
    "more than there are": ({"cpu.max": f"{(AFFINE + 3) * 100000} 100000\n"}, AFFINE),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_no_more_cores_than_a_container_has_the_time_of(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, expected = LIMITS[limit]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    assert usable_cores() == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), ("3", 3)], ids=str)
def test_no_more_threads_than_cores_compute(asked: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(models, "usable_cores", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", asked or "")
    if asked is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    try:
        models.compute_device(ActorConfig())
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
