"""The demo's promise: a real model learns a real task within minutes, and the same seed gives the same curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POINTS = 30
"""Held-out greedy accuracy gained, in percentage points."""
STEPS = 4
"""Enough to gain that much; the demo itself goes on."""


def run_demo(output: Path, steps: int) -> list[dict[str, float]]:
    printed_by("examples/sums.py", output, steps)
    return metrics(output)


def printed_by(script: str, output: Path, steps: int) -> str:
    command = [sys.executable, script, "--steps", str(steps), "--output-dir", str(output)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        command, cwd=ROOT, check=True, timeout=1600, env=environment, stdout=subprocess.PIPE, text=True
    )
    return run.stdout


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns_and_repeats(tmp_path: Path) -> None:
    first = run_demo(tmp_path / "first", STEPS)
    accuracy = [line["eval/pass@1"] for line in first if "eval/pass@1" in line]
    assert 100 * (accuracy[-1] - accuracy[0]) >= POINTS
    for name in ("report.html", "curves.png", "model/model.safetensors", "samples.jsonl"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    again = run_demo(tmp_path / "again", 2)
    steps = [line for line in first if "reward/mean" in line][:2]
    repeated = [line for line in again if "reward/mean" in line]
    assert [curve(line) for line in steps] == [curve(line) for line in repeated]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_agents_demo_trains_on_its_tool_and_calls_it(tmp_path: Path) -> None:
    """It learns more slowly than a test can wait for; `make demo-agent` shows that it does."""
    printed = printed_by("examples/products.py", tmp_path, 1)
    before, trained, after = metrics(tmp_path)
    assert trained["reward/tool_calls"] > 0.3
    assert trained["reward/branches"] == 1
    assert trained["policy/grad_norm"] > 0
    assert min(before["eval/pass@1"], after["eval/pass@1"]) > 0.5
    assert "     tool  3504\n" in printed


def curve(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith("time/")}
