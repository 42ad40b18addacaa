"""Runs that are killed at random moments and continued are, where a run is repeatable, what they would have been.

The long form of it is `python -m tests.kills`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = "ppo", "asynchronous", "grpo", "over-sampling"
"""Kinds of runs that are repeatable, to the bit."""


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kinds", [KINDS[:1], pytest.param(KINDS[1:], marks=pytest.mark.wide)], ids=" and ".join)
def test_runs_that_are_killed_and_continued_come_to_the_same(kinds: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kills", "--kills", str(len(kinds)), "--only", *kinds]
    found = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("nothing differs") == len(kinds)
