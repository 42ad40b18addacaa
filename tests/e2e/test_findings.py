"""A run that cannot learn says so at the step where it is known, and in its last lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(folder: Path, model: Path, reward: str, *flags: str) -> tuple[list[str], str]:
    """Lines on stderr, and stdout, of a run of five steps."""
    rows = [{"input": f"What is {a} plus {a}?", "label": str(2 * a)} for a in range(1, 9)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(f"def reward_func(queries, prompts, labels):\n    return {reward}\n")
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "train", "rl"]
    command += ["--actor.model_name_or_path", str(model), "--data.prompt_dataset", "prompts.jsonl"]
    command += ["--data.label_key", "label", "--reward.function_path", "reward.py", "--rollout.batch_size", "4"]
    command += ["--rollout.n_samples_per_prompt", "2", "--train.max_steps", "5", "--ckpt.output_dir", "out", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines(), done.stdout


def test_a_constant_reward_is_said_at_the_third_step_and_at_the_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    lines, printed = run(
        tmp_path,
        tiny_model_dir,
        "[0.0 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        "--rollout.max_new_tokens",
        "300",
    )
    said = [number for number, line in enumerate(lines) if "level=warning" in line]
    assert len(said) == 1
    assert "The reward was 0 for every reply of 3 rollouts in a row (8 replies each)" in lines[said[0]]
    assert "--data.label_key" in lines[said[0]]
    assert lines[said[0] - 1].startswith("step 3/5")
    assert lines[said[0] + 1].startswith("step 4/5")
    assert lines[-2] == "warning: Nothing was learned: the gradient was 0 in all 5 updates."
    assert lines[-1].startswith("warning: steps 1 to 5: The reward was 0 for every reply")
    assert printed == "out/report.html\n"


def test_replies_that_are_all_cut_are_said(tiny_model_dir: Path, tmp_path: Path) -> None:
    lines, _ = run(
        tmp_path,
        tiny_model_dir,
        "[len(set(query)) / 100 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        "--rollout.max_new_tokens",
        "1",
        "--train.seed",
        "3",
    )
    (said,) = (line for line in lines if "level=warning" in line)
    assert "--rollout.max_new_tokens, which is 1" in said
    assert not any("Nothing was learned" in line for line in lines)


def test_a_run_that_learns_says_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    lines, _ = run(
        tmp_path,
        tiny_model_dir,
        "[len(set(query)) / 100 for query in queries]",
        "--algo.advantage.estimator",
        "rloo",
        "--rollout.max_new_tokens",
        "300",
    )
    assert [line for line in lines if "warning" in line] == []
