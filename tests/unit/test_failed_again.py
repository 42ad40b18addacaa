"""Tests that failed, run a second time."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import failed_again

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    tries = Path(f"tries{{number}}")
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) >= {needed}

def test_of_no_fault():
    Path("whole").write_text(Path("whole").read_text() + "." if Path("whole").exists() else ".")
"""


@pytest.mark.parametrize(
    ("count", "needed", "status", "tries", "said"),
    [
        (2, 2, 0, 2, "These tests are flaky, they passed only when alone:\ntest_its.py::test_it[0]\n"),
        (2, 3, 1, 2, "The 2 that failed are tried again, alone:\n"),
        (6, 2, 1, 1, "6 tests failed: more than 5, so none is tried again.\n"),
    ],
)
def test_few_tests_that_failed_get_a_second_try(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    needed: int,
    status: int,
    tries: int,
    said: str,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those take more time to import than the tests
    (tmp_path / "test_its.py").write_text(TESTS.format(count=count, needed=needed))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    first = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert first.returncode == 1
    assert failed_again.main(tmp_path) == status
    assert {len((tmp_path / f"tries{number}").read_text()) for number in range(count)} == {tries}
    assert len((tmp_path / "whole").read_text()) == 1, "what passed does not run again"
    assert said in capfd.readouterr().out


def test_failures_of_runs_before_are_forgotten() -> None:
    done = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    forgets, runs = (done.stdout.index(words) for words in ("rm -f .pytest_cache/v/cache/lastfailed", "bin/pytest"))
    assert forgets < runs
