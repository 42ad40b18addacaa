"""Every script under benchmarks/ starts, does its smallest work (`--smoke`) and prints its result."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {
    "advantages.py": r"^ratio \d+\.\d+$",
    "agents_learn.py": r"a program \(openai SDK\)\s*│ \d\.\d\d",
    "async_overlap.py": r"partial rollout, recomputed │\s+\d+\.\d\d",
    "cluster_learns.py": r"colocated │ \d+%",
    "controller.py": r"^growth \d+\.\d+$",
    "judges.py": r"^reasoning-gym: \d+ verdicts/s, without walls \d+: \d+\.\d+ times$",
    "learning_curves.py": r"on_policy_distill │\s+\d+%",
    "server_load.py": r"attacked \d+\.\d+ s: \d+\.\d+ times$",
    "sums_reward_model.py": r"^\d+% of right and wrong replies",
    "versus_trl.py": r"(?s:^ratio .*^ratio .*)^ratio \d+\.\d+$",
    "weight_sync.py": r"tokens/s, 2 rows +\d+",
}
"""A line of the result that each script prints."""
STARTED_BY_OTHERS = {"server_clients.py"}
"""Scripts that a benchmark runs in a process of their own."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a script, or `-m` and a module; returns what it printed. It can import rollgrad, as where that is
    installed, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "path").mkdir()
    (folder / "path" / "rollgrad").symlink_to(ROOT / "rollgrad")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this very suite
    ours = {"PYTHONPATH": str(folder / "path"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, str(ROOT / "tests" / "script_host.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env={**outer, **ours}, text=True, start_new_session=True, **pipes) as host:

        def run(*words: str) -> str:
            output = folder / f"output-{len(list(folder.iterdir()))}"
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.write("\t".join((str(output), *words)) + "\n")
            host.stdin.flush()
            status = host.stdout.readline().strip()
            printed = output.read_text()
            assert status == "0", printed[-4000:]
            return printed

        try:
            yield run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)  # with a script that hangs


def scripts() -> list[str]:
    """Files that run by themselves; the others are pytest's, or have what several share."""
    files = (ROOT / "benchmarks").glob("*.py")
    names = {file.name for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}
    return sorted(names - STARTED_BY_OTHERS)


def test_each_script_is_started_here() -> None:
    assert scripts() == sorted(RESULTS), "a script under benchmarks/ has --smoke and, in RESULTS, a line that it prints"


@pytest.mark.parametrize("script", scripts())
def test_a_script_does_its_smallest_work(script: str, run: Callable[..., str]) -> None:
    before = pictures()
    printed = run(f"benchmarks/{script}", "--smoke")
    assert re.search(RESULTS[script], printed, re.MULTILINE), printed
    assert pictures() == before, "figures of the smallest work are not for the docs"


def test_the_suites_do_their_smallest_work(run: Callable[..., str]) -> None:
    printed = run("-m", "pytest", "benchmarks", "--smoke", "--benchmark-only", "-q", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed


def pictures() -> dict[str, bytes]:
    """Files that the docs show, by name."""
    return {file.name: file.read_bytes() for file in (ROOT / "docs" / "images").iterdir()}
