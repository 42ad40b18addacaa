"""Processes that compute together over gloo: started by a test, and meeting in a folder.

They are forks of one that has made their models before, and so has imported what takes longer than they do.
"""

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
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
    words = [*python, "-m", module, str(folder), str(timeout), str(processes), *names]
    subprocess.run(words, cwd=ROOT, timeout=timeout, check=True)
    return [torch.load(folder / str(rank)) for rank in range(processes)]


def fork_all(work: Callable[[Path, float, int, int, list[str]], None], make: Callable[[str], object]) -> None:
    """Runs `work` in the processes that `results_of` asks the main module for, and `make` for each name before."""
    folder, timeout, processes, *names = sys.argv[1:]
    torch.set_num_threads(1)  # others would be lost in a fork
    for name in names:
        make(name)
    gc.freeze()
    children = [
        _fork(work, Path(folder), float(timeout), rank, int(processes), names) for rank in range(int(processes))
    ]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def _fork(work: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


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
