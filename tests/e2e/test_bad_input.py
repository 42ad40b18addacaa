"""Input that only shows once files are read or replies are judged: status 2, one `error:` line, no traceback."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rollgrad.entrypoints.cli.main import main
from tests.example_runs import logged

GOOD_REWARD = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"input": f"What is {a} plus 1?", "label": str(a + 1)} for a in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"input": \n')
    (tmp_path / "reward.py").write_text(GOOD_REWARD)
    (tmp_path / "plain.txt").write_text("")
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "group_norm"}},
        "data": {"prompt_dataset": "prompts.jsonl", "input_key": "input", "label_key": "label"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4},
        "train": {"max_steps": 1},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one error on stderr: its last line, after what the run may have told before."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *told, error = captured.err.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("timestamp=") for line in told), captured.err
    return error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.prompt_dataset empty.jsonl", "empty.jsonl"),
        ("--data.prompt_dataset broken.jsonl", "broken.jsonl"),
        ("--data.input_key question", "--data.input_key"),
        ("--data.label_key answer", "--data.label_key"),
        ("--data.max_prompt_tokens 3", "--data.max_prompt_tokens"),
        ("--rollout.max_new_tokens 512", "--rollout.max_new_tokens"),
        ("--reward.function_path missing.py", "missing.py"),
        ("--reward.function_path plain.txt", "plain.txt"),
        ("--ckpt.output_dir plain.txt/run", "--ckpt.output_dir"),
        ("--eval.dataset empty.jsonl", "empty.jsonl"),
        pytest.param(f"--eval.dataset {'x' * 300}.jsonl", "check --eval.dataset", id="long_name"),
    ],
)
def test_training_refuses_in_one_sentence(
    workspace: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert message in refused(capsys, "train", "rl", "--config", "run.yaml", *flags.split())
    assert not (workspace / "out" / "model").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('answer')", "raised KeyError: 'answer'"),
        ("return [1.0]*len(queries) + [0.0]", "returned 2 rewards for 1 reply"),
        ("return []", "returned 0 rewards"),
        ("return [float('nan')] * len(queries)", "finite"),
        ("return [float('-inf')] * len(queries)", "finite"),
        ("return None", "not numbers"),
        ("return ['good'] * len(queries)", "not numbers"),
        ("import time; time.sleep(5)", "--reward.timeout"),
        ("return undefined_name", "NameError"),
    ],
)
def test_a_bad_reward_function_ends_the_run_in_one_sentence(
    workspace: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    Path("reward.py").write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    seconds = "0.3" if "sleep" in body else "120"
    found = refused(capsys, "train", "rl", "--config", "run.yaml", "--reward.timeout", seconds)
    assert message in found
    assert "reward_func" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(:", "SyntaxError"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("def reward(queries, prompts, labels): ...", "reward_func"),
    ],
)
def test_a_reward_file_that_cannot_be_used(
    workspace: Path, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    Path("reward.py").write_text(source)
    found = refused(capsys, "train", "rl", "--config", "run.yaml")
    assert message in found
    assert "reward.py" in found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval.dataset empty.jsonl", "empty.jsonl"),
        ("--eval.dataset prompts.jsonl --data.label_key answer", "--data.label_key"),
        ("--eval.dataset prompts.jsonl --eval.max_new_tokens 512", "--eval.max_new_tokens"),
    ],
)
def test_evaluation_refuses_in_one_sentence(
    workspace: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert message in refused(capsys, "eval", "--config", "run.yaml", *flags.split())


def test_failures_within_the_budget_do_not_end_the_run(workspace: Path) -> None:
    Path("reward.py").write_text(
        "import itertools\n"
        "calls = itertools.count(1)\n"
        "def reward_func(queries, prompts, labels):\n"
        "    call = next(calls)\n"
        "    return [float('nan') if call == 2 else float(call)]\n"
    )
    assert main(["train", "rl", "--config", "run.yaml", "--rollout.max_failures", "1"]) == 0
    (row,) = logged(Path("out"))
    assert row["rollout/failed_reward"] == 1.0
    assert row["rollout/samples"] == 3.0


@pytest.mark.slow
def test_a_real_process_says_the_same(workspace: Path, rollgrad_command: list[str]) -> None:
    Path("reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('answer')\n")
    command = [*rollgrad_command, "train", "rl", "--config", "run.yaml"]
    result = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=400)
    assert result.returncode == 2
    assert result.stdout == ""
    error = result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert re.fullmatch(
        r"error: \d episodes failed \(\d reward\), and 1 may .*KeyError: 'answer' \(reward\.py, line 2\)", error
    )
