"""Bad input to the real command line: status 2, one `error:` line, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.main import main


def rollgrad(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "plain.txt").write_text("")
    good = (
        "actor:\n  model_name_or_path: ./model\n"
        "data:\n  prompt_dataset: prompts.jsonl\n  label_key: label\n"
        "reward:\n  verifier: last_number\n"
    )
    (tmp_path / "good.yaml").write_text(good)
    (tmp_path / "bad.yaml").write_text(f"{good}algo:\n  advantage:\n    estimatr: rloo\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian rl", "did you mean rollgrad train rl?"),
        ("train rl --config good.yaml --algo.advantage.estimatr rloo", "did you mean --algo.advantage.estimator?"),
        ("train rl --config good.yaml --algo.advantage.estimator vtrace", "reinforce_baseline"),
        ("train rl --config good.yaml --train.max_steps many", "--train.max_steps"),
        ("train rl --config missing.yaml", "missing.yaml cannot be read"),
        ("train rl --config bad.yaml", "did you mean algo.advantage.estimator?"),
        (
            "train rl --config good.yaml --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 1",
            "--rollout.n_samples_per_prompt",
        ),
        ("train rl --config good.yaml --rollout.temperature 0", "--rollout.temperature"),
        ("train rl --config good.yaml --actor.model_name_or_path ./missing", "./missing"),
        ("train rl --config good.yaml --data.prompt_dataset missing.jsonl", "missing.jsonl"),
        ("train rl --config good.yaml --ckpt.output_dir plain.txt/run", "--ckpt.output_dir"),
        ("train rl --config good.yaml --reward.verifier None --reward.function_path missing.py", "missing.py"),
        ("eval --config good.yaml", "--eval.dataset"),
        ("eval --config good.yaml --eval.dataset missing.jsonl", "missing.jsonl"),
        ("doctor --jsn", "did you mean --json?"),
    ],
)
def test_bad_input_is_one_sentence(
    workspace: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    assert main(arguments.split()) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert not Path("runs").exists()


def test_all_that_is_missing_is_told_at_once(workspace: Path) -> None:
    result = rollgrad("train", "rl", "--config", "plain.txt", "--rollout.top_p", "7", cwd=workspace)
    lines = result.stderr.splitlines()
    assert result.returncode == 2
    assert result.stdout == ""
    assert not (workspace / "runs").exists()
    assert all(line.startswith("error: ") for line in lines)
    assert [flag for flag in ("top_p", "model_name_or_path", "prompt_dataset") if flag in result.stderr] == [
        *("top_p", "model_name_or_path", "prompt_dataset")
    ]
    assert len(lines) == 3


def says_what_cannot_be_loaded(errors: str) -> None:
    said = [line.replace("-", "_") for line in errors.splitlines() if line.startswith("error: ")]
    assert 1 <= len(said) <= 2, "it has no weights, and no tokenizer"
    assert all("actor.model_name_or_path" in line for line in said)
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "train rl --config good.yaml",
        "train rl --config good.yaml --dry_run",
        "eval --config good.yaml --eval.dataset prompts.jsonl",
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_sentence_for_each_thing_it_lacks(
    workspace: Path, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    assert main(arguments.split()) == 2
    says_what_cannot_be_loaded(capsys.readouterr().err)


def test_ctrl_c_while_modules_are_imported_ends_it_quietly(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'rollgrad.application.settings.run':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background jobs lack
        "from rollgrad.entrypoints.cli.main import main\n"
        "sys.exit(main(['--version']))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
