"""Profiles of steps: what is written, and of which steps."""

import gzip
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.system.profile import StepProfiler, begin_profile
from rollgrad.domain.errors import WorkerError


class Others:
    """Two processes, one after the other."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def begin_profile(self) -> None:
        self.said.append("begin")

    async def end_profile(self) -> dict[str, bytes]:
        self.said.append("end")
        return {f"actor-{rank}": gzip.compress(b'{"traceEvents": []}') for rank in range(2)}


def written(directory: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(directory)): json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in directory.rglob("*.json.gz")
    }


async def take(profile: StepProfiler, steps: Iterable[int], work: Callable[[], Any] = lambda: None) -> None:
    """Takes steps of a run."""

    for step in steps:
        async with profile(step):
            work()


async def test_the_steps_after_the_first_are_written_with_all_threads_and_processes(tmp_path: Path) -> None:
    others = Others()

    def work() -> None:
        torch.ones(3, 3).mm(torch.ones(3, 3))
        thread = threading.Thread(target=lambda: torch.ones(3, 3).addmm(torch.ones(3, 3), torch.ones(3, 3)))
        thread.start()
        thread.join()

    await take(StepProfiler(tmp_path / "profile", 2, [others]), range(1, 5), work)
    assert others.said == ["begin", "end"] * 2
    traces = written(tmp_path / "profile")
    names = ("run", "actor-0", "actor-1")
    assert set(traces) == {f"step-{step:06d}/{name}.json.gz" for step in (2, 3) for name in names}
    threads = {event["name"]: event["tid"] for event in traces["step-000002/run.json.gz"] if "tid" in event}
    assert threads["aten::mm"] != threads["aten::addmm"]


async def test_a_continued_run_begins_to_count_where_it_continues(tmp_path: Path) -> None:
    await take(StepProfiler(tmp_path / "profile", 1), range(7, 10))
    assert set(written(tmp_path / "profile")) == {"step-000008/run.json.gz"}


class Dying(Others):
    """Processes that do not live to the end of a profile, or not even to its beginning."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    async def begin_profile(self) -> None:
        if self.when == "begin":
            raise WorkerError("died")

    async def end_profile(self) -> dict[str, bytes]:
        raise WorkerError("died")


@pytest.mark.parametrize("when", ["begin", "end"])
async def test_a_profile_that_cannot_be_made_undoes_no_step_and_no_other_profile(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[None] = []
    profile = StepProfiler(tmp_path / "profile", 1, [Dying(when), Others()])
    await take(profile, (1, 2), lambda: taken.append(None))
    assert len(taken) == 2
    assert capsys.readouterr().out.count("the profile cannot be written") == 1
    names = ("run", "actor-0", "actor-1")
    assert set(written(tmp_path / "profile")) == {f"step-000002/{name}.json.gz" for name in names}
    begin_profile()()  # that of this process has ended, for there is one at a time


async def test_without_steps_nothing_is_profiled(tmp_path: Path) -> None:
    await take(StepProfiler(tmp_path / "profile", 0, [Others()]), [2])
    assert not (tmp_path / "profile").exists()


async def test_traces_that_cannot_be_written_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("a file")
    await take(StepProfiler(tmp_path / "profile", 1), (1, 2))
    assert capsys.readouterr().out.count("the profile cannot be written") == 1
