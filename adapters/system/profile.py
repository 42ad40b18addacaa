"""Chrome traces of what processes compute, for chrome://tracing and https://ui.perfetto.dev."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
import torch

from rollgrad.domain.ports.profiled import Profiled

log = structlog.get_logger(__name__)

UNPROFILED = 1
"""Steps of a process before those that are profiled: the first does much that later ones do not, it loads kernels, and
takes memory."""


class StepProfiler:
    """Writes a Chrome trace of each process in some steps of a run, to `directory/step-N/NAME.json.gz`.

    Args:
        directory: where the traces are.
        steps: number of steps, after the first `UNPROFILED` that this process takes; 0 profiles none.
        others: the processes of models and engines that are not in this one.
        keep: is called before something is written, and raises an error if another run has the directory by now.
    """

    def __init__(
        self,
        directory: Path,
        steps: int,
        others: Sequence[Profiled] = (),
        *,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self._directory = directory
        self._profiled = range(UNPROFILED, UNPROFILED + steps)
        self._others = others
        self._keep = keep
        self._taken = 0

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[None]:
        """Profiles its block, which is the step of this number. A profile that cannot be made or written is reported,
        and does not stop the run, nor undo the step, nor keep those of other processes from being written; that of a
        block that raises is not written."""
        profiled = self._taken in self._profiled
        self._taken += 1
        if not profiled:
            yield
            return
        begun = []
        for processes in (*self._others, _ThisProcess()):
            with _reported(step):
                await processes.begin_profile()
                begun.append(processes)
        yield
        for processes in reversed(begun):
            with _reported(step):
                folder = self._directory / f"step-{step:06d}"
                traces = await processes.end_profile()
                self._keep()
                folder.mkdir(parents=True, exist_ok=True)
                for name, content in traces.items():
                    (folder / f"{name}.json.gz").write_bytes(content)
                    log.info("a profile is written", path=str(folder / f"{name}.json.gz"))


class _ThisProcess(Profiled):
    """This process as one of those that are profiled."""

    async def begin_profile(self) -> None:
        """Begins to record."""
        self._end = begin_profile()

    async def end_profile(self) -> Mapping[str, bytes]:
        """Ends; returns the trace."""
        return {"run": self._end()}


@contextmanager
def _reported(step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # from the disk, torch, or a process that died, which the next step notices, too
        log.warning("the profile cannot be written", step=step, reason=str(error))


def begin_profile() -> Callable[[], bytes]:
    """Begins to record what all threads of this process and its GPU compute. Returns a function that ends it and gives
    the Chrome trace, JSON compressed by gzip."""
    whole: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(experimental_config=whole)
    profiler.start()
    return partial(_ended, profiler)


def _ended(profiler: torch.profiler.profile) -> bytes:
    profiler.stop()
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
