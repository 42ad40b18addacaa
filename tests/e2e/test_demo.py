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


def few_held_out(name: str, folder: Path, **rollout: int) -> Path:
    """A copy of the demo `name` that is evaluated on four tasks, and whose rollouts have these sizes."""
    (folder / "data").mkdir()
    for file in (f"{name}.py", "smollm2.py", *(f"data/{shots.name}" for shots in EXAMPLES.glob(f"data/{name}_shots*"))):
        (folder / file).write_bytes((EXAMPLES / file).read_bytes())
    few = (EXAMPLES / "data" / f"{name}_test.jsonl").read_text().splitlines(keepends=True)[:4]
    (folder / "few.jsonl").write_text("".join(few))
    settings = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    settings["eval"]["dataset"] = str(folder / "few.jsonl")
    settings["rollout"] |= rollout
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder / f"{name}.py"


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
    again, _ = run_demo(few_held_out("sums", tmp_path), tmp_path / "again", 2)
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
    script = few_held_out("word_problems", tmp_path)
    few = (tmp_path / "few.jsonl").read_text().splitlines()
    assert {frozenset(json.loads(row)) for row in few} == {frozenset({"question", "answer"})}
    assert all(re.search(r"\n#### \d+$", json.loads(row)["answer"]) for row in few)
    (before, trained, after), _ = run_demo(script, tmp_path / "run", 1)
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
    """Half of its first step, for it takes longer to learn than a test should."""
    script = few_held_out("products", tmp_path, batch_size=2)
    (before, trained, after), printed = run_demo(script, tmp_path / "run", 1)
    assert trained["reward/tool_calls"] > 0.3
    assert trained["reward/branches"] == 1
    assert trained["policy/grad_norm"] > 0
    assert before.keys() == after.keys()
    assert "     tool  3504\n" in printed


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_of_fine_tuning_learns_within_three_small_steps(tmp_path: Path) -> None:
    flags = {"ckpt.output_dir": tmp_path / "run", "ckpt.state_minutes": None, "data.cache_dir": tmp_path / "cache"}
    flags |= {"train.max_steps": 3, "train.batch_size": 4, "eval.max_samples": 4, "eval.steps": -1}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / "sft.py"), *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=2400, env=environment, stdout=subprocess.PIPE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (line for line in lines if "eval/loss" in line)
    assert after["eval/loss"] < before["eval/loss"] - 0.5
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.1
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def curve(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith("time/")}
