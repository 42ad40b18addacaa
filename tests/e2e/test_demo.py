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


AGENT_POINTS, AGENT_STEPS = 10, 2
"""The same for the agent's demo, which starts at about 65%."""


def run_demo(output: Path, steps: int, script: str = "examples/sums.py") -> list[dict[str, float]]:
    command = [sys.executable, script, "--steps", str(steps), "--output-dir", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1600, env={**os.environ, "HF_HUB_OFFLINE": "1"})
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
def test_the_agents_demo_learns_to_use_its_tool(tmp_path: Path) -> None:
    lines = run_demo(tmp_path, AGENT_STEPS, "examples/products.py")
    accuracy = [line["eval/pass@1"] for line in lines if "eval/pass@1" in line]
    assert 100 * (accuracy[-1] - accuracy[0]) >= AGENT_POINTS
    calls = [line["reward/tool_calls"] for line in lines if "reward/tool_calls" in line]
    assert calls[-1] > calls[0]
    assert all(line["reward/branches"] == 1 for line in lines if "reward/branches" in line)


def curve(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith("time/")}
