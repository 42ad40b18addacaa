"""The demo's promise: a real model learns a real task within minutes, and the same seed gives the same curve."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
POINTS = 30
"""Held-out greedy accuracy gained, in percentage points."""
STEPS = 4
"""Enough to gain that much; the demo itself goes on."""


def run_demo(script: Path, output: Path, steps: int) -> tuple[list[dict[str, float]], str]:
    """What it measured, and what it printed."""
    command = [sys.executable, str(script), "--steps", str(steps), "--output-dir", str(output)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        command, cwd=ROOT, check=True, timeout=2400, env=environment, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()], run.stdout


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns_and_repeats(tmp_path: Path) -> None:
    first, _ = run_demo(EXAMPLES / "sums.py", tmp_path / "first", STEPS)
    accuracy = [line["eval/pass@1"] for line in first if "eval/pass@1" in line]
    assert 100 * (accuracy[-1] - accuracy[0]) >= POINTS
    cut = [line["eval/truncated_share"] for line in first if "eval/truncated_share" in line]
    assert cut[-1] < min(0.5, cut[0])  # replies come to end by themselves
    for name in ("report.html", "curves.png", "model/model.safetensors", "samples.jsonl"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    again, _ = run_demo(EXAMPLES / "sums.py", tmp_path / "again", 2)
    steps = [line for line in first if "reward/mean" in line][:2]
    repeated = [line for line in again if "reward/mean" in line]
    assert [curve(line) for line in steps] == [curve(line) for line in repeated]


def test_the_demo_is_evaluated_several_times_on_its_way() -> None:
    settings = yaml.safe_load((EXAMPLES / "sums.yaml").read_text())
    assert settings["train"]["max_steps"] // settings["eval"]["steps"] >= 3


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_of_word_problems_has_gsm8ks_form_and_groups_to_learn_from(tmp_path: Path) -> None:
    """Runs its first step, with a small evaluation."""
    (tmp_path / "data").mkdir()
    for file in ("word_problems.py", "smollm2.py"):
        (tmp_path / file).write_bytes((EXAMPLES / file).read_bytes())
    few = (EXAMPLES / "data" / "word_problems_test.jsonl").read_text().splitlines(keepends=True)[:4]
    assert {frozenset(json.loads(row)) for row in few} == {frozenset({"question", "answer"})}
    assert all(re.search(r"\n#### \d+$", json.loads(row)["answer"]) for row in few)
    (tmp_path / "few.jsonl").write_text("".join(few))
    settings = yaml.safe_load((EXAMPLES / "word_problems.yaml").read_text())
    settings["eval"]["dataset"] = str(tmp_path / "few.jsonl")
    (tmp_path / "word_problems.yaml").write_text(yaml.safe_dump(settings))
    (before, trained, after), _ = run_demo(tmp_path / "word_problems.py", tmp_path / "run", 1)
    assert 0 < trained["reward/mean"] < 0.5
    assert trained["policy/grad_norm"] > 0
    assert trained["rollout/truncated_share"] < 0.5  # replies end with their line
    assert before.keys() == after.keys()


def test_word_problems_are_held_out_by_calculation() -> None:
    def calculations(name: str) -> set[str]:
        rows = (EXAMPLES / "data" / f"word_problems_{name}.jsonl").read_text().splitlines()
        return {json.loads(row)["answer"].split(" =")[0] for row in rows}

    assert not calculations("train") & calculations("test")


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_agents_demo_trains_on_its_tool_and_calls_it(tmp_path: Path) -> None:
    """Half a step of it, for it takes longer to learn than a test should."""
    (tmp_path / "data").mkdir()
    for file in ("products.py", "smollm2.py", "data/products_shots.json"):
        (tmp_path / file).write_bytes((EXAMPLES / file).read_bytes())
    few = (EXAMPLES / "data" / "products_test.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "few.jsonl").write_text("".join(few))
    settings = yaml.safe_load((EXAMPLES / "products.yaml").read_text())
    settings["rollout"]["batch_size"] //= 2
    settings["eval"]["dataset"] = str(tmp_path / "few.jsonl")
    (tmp_path / "products.yaml").write_text(yaml.safe_dump(settings))
    (before, trained, after), printed = run_demo(tmp_path / "products.py", tmp_path / "run", 1)
    assert trained["reward/tool_calls"] > 0.3
    assert trained["reward/branches"] == 1
    assert trained["policy/grad_norm"] > 0
    assert before.keys() == after.keys()
    assert "     tool  3504\n" in printed


def curve(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith("time/")}
