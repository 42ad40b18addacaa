"""A run in one process says nothing on stderr but its own lines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEP = re.compile(r"step \d+/2( |$)")
OWN = re.compile(r'timestamp=\S+ level=info event="(prompts: prompts from column|off-policy correction").*')
"""Which columns were taken, and which correction acts."""
FLAGS = {
    "rloo": ["--algo.advantage.estimator", "rloo", "--ckpt.save_steps", "1"],
    "ppo with adapters": ["--algo.preset", "ppo", "--critic.adam.lr", "1e-3", "--actor.lora.rank", "2"],
}


@pytest.mark.parametrize(("name", "imports"), [("rloo", True), ("ppo with adapters", False)])
def test_a_run_says_nothing_but_its_own_lines(
    name: str, imports: bool, tiny_model_dir: Path, rollgrad_command: list[str], tmp_path: Path
) -> None:
    """One of them also imports everything."""
    rows = [{"input": f"What is {a} plus {a}?", "label": str(2 * a)} for a in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [len(set(query)) / 100 for query in queries]\n"
    )
    command = ["train", "rl", "--actor.model_name_or_path", str(tiny_model_dir), "--actor.adam.lr", "1e-3"]
    command += ["--data.prompt_dataset", "prompts.jsonl", "--data.label_key", "label"]
    command += ["--reward.function_path", "reward.py", "--rollout.batch_size", "4"]
    command += ["--rollout.n_samples_per_prompt", "2", "--train.max_steps", "2"]
    command += ["--rollout.max_new_tokens", "60", "--rollout.stop_strings", "a", "e", "i", "o"]  # replies end
    run = subprocess.run(
        [
            *([sys.executable, "-m", "rollgrad.entrypoints.cli.main"] if imports else rollgrad_command),
            *(*command, *FLAGS[name], "--ckpt.output_dir", "out"),
        ],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if not (STEP.match(line) or OWN.fullmatch(line))] == []
    assert run.stdout == "out/report.html\n"
