"""Processes that compute together over gloo: started by a test, and meeting in a folder."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.scripts import ROOT


def results_of(
    python: Sequence[str], module: str, folder: Path, timeout: float, processes: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns what each of so many processes of `module` saves in the file `<rank>` of `folder`, for the names."""
    command = [*python, "-m", module, str(folder), str(timeout)]
    started = [subprocess.Popen([*command, str(rank), str(processes), *names], cwd=ROOT) for rank in range(processes)]
    try:
        assert [process.wait(timeout) for process in started] == [0] * processes
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / str(rank)) for rank in range(processes)]


@contextmanager
def met(folder: Path, timeout: float, rank: int, processes: int) -> Iterator[None]:
    """Makes this process one of torch's default group inside the block; they meet in `folder`."""
    from datetime import timedelta

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=timeout),
    )
    yield
    distributed.destroy_process_group()
