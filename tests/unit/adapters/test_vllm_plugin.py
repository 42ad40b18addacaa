"""vLLM's processes of an engine end with the process that started them, however that ends."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollgrad.adapters.engines.vllm import plugin
from rollgrad.adapters.engines.vllm.launch import shut_down, start
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.errors import MissingExtraError

DEADLINE = 120.0
"""Seconds after which a test has failed."""

OF_VLLM = ("EngineCore_DP0", "VllmWorker-1")
"""Names of processes of an engine, and of those that share its model."""


def engine(name: str) -> None:
    """Works until it is killed, as vLLM's process of an engine does."""
    plugin.GRACE_SECONDS = 0.1
    plugin.end_with_parent()
    print(name, psutil.Process().pid, flush=True)
    time.sleep(DEADLINE)


def start_engines() -> None:
    """Starts two of vLLM's processes and another, in a thread that ends at once."""
    import threading

    context = multiprocessing.get_context("spawn")
    made = [context.Process(target=engine, args=(name,), name=name) for name in (*OF_VLLM, "Other")]
    thread = threading.Thread(target=lambda: [process.start() for process in made])
    thread.start()
    thread.join()
    for process in made:
        process.join()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_process_leaves_no_engine_behind() -> None:
    command = [sys.executable, "-c", f"from {__name__} import start_engines; start_engines()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as parent:
        assert parent.stdout is not None
        told = dict(parent.stdout.readline().split() for _ in range(3))
        *engines, other = (psutil.Process(int(told[name])) for name in (*OF_VLLM, "Other"))
        try:
            assert all(map(lives, engines)), "the thread that started them has ended, its process has not"
            parent.kill()
            parent.wait(DEADLINE)
            end = time.monotonic() + DEADLINE
            while any(map(lives, engines)) and time.monotonic() < end:
                time.sleep(0.05)
            assert not any(map(lives, engines))
            assert lives(other), "what is not vLLM's is left alone"
        finally:
            for process in filter(lives, (*engines, other)):
                process.kill()


def test_engines_are_started_in_a_way_that_loads_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own way where no GPU is in use yet is a fork, which inherits that plugins are loaded."""
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("vllm", "vllm.engine.arg_utils"):  # which tests before may have imported
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError):
        start(SyncBackend.SHARED_MEMORY)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the names are in vLLM")
def test_the_names_of_processes_are_those_of_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    for file, begins, count in (
        ("engine/utils.py", plugin.ENGINE_CORE, 2),
        ("executor/multiproc_executor.py", plugin.WORKER, 1),
    ):
        source = (Path(found.origin).parent / "v1" / file).read_text(encoding="utf-8")
        (name,) = (line for line in source.splitlines() if line.strip().startswith("name=") and begins in line)
        assert name.count(f'"{begins}') == count, name


def test_a_process_that_ends_while_vllm_is_shut_down_is_no_error() -> None:
    """vLLM asks psutil for the children of a process that it is to kill, which may be gone by then."""
    import psutil

    class Ending:
        def shutdown(self) -> None:
            raise psutil.NoSuchProcess(1)

    llm = Ending()
    shut_down(llm)
    llm.shutdown()  # nothing is done again
