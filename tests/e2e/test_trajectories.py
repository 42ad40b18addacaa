"""Every run leaves its rollouts, token by token, and a word about how it goes and ended."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import yaml

from rollgrad.adapters.tracking.trajectory_files import trajectory_files
from rollgrad.adapters.tracking.trajectory_schema import schema
from rollgrad.entrypoints import reporting, training
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.run_record import RunStatus, read_run
from tests.example_runs import logged, rollouts

REWARD = """
import os, signal
replies = 0

def reward_func(queries, prompts, labels):
    global replies
    replies += len(queries)
    if replies >= int(os.environ.get("KILLED_AT", 1000)):
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(c.isalpha() for c in q[len(p):]) / 8 for q, p in zip(queries, prompts, strict=True)]
"""
WAIT_SECONDS = 300.0


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with everything for a run of three steps."""
    prompts = [{"input": f"What is {a} plus {a}?", "label": str(2 * a)} for a in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "reward.py").write_text(REWARD)
    run = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "rloo"}},
        "data": {"prompt_dataset": "prompts.jsonl", "label_key": "label"},
        "eval": {"dataset": "prompts.jsonl", "n_samples_per_prompt": 1},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 3, "max_new_tokens": 6},
        "train": {"max_steps": 3},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out", "state_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*flags: str) -> int:
    return main(["train", "rl", "--config", "run.yaml", *flags])


def names() -> list[str]:
    return [path.stem for path in trajectory_files(Path("out"))]


def kept() -> list[dict[str, Any]]:
    return list(rollouts(Path("out"), schema().names))


def loss_of(step: Sequence[dict[str, Any]]) -> float:
    """The loss of an update whose ratios are 1, from its tokens."""
    return -sum(
        weight * advantage
        for row in step
        for weight, advantage in zip(row["token_weight"], row["token_advantage"], strict=True)
    )


def test_a_run_leaves_all_rollouts_whose_tokens_sum_to_the_logged_loss(workspace: Path) -> None:
    assert train("--train.profile_steps", "1") == 0
    assert [str(path) for path in Path("out/profile").rglob("*.gz")] == ["out/profile/step-000002/run.json.gz"]
    assert names() == ["eval-000000", "step-000001", "step-000002", "step-000003", "eval-000003"]
    for metrics in logged(Path("out")):
        if "policy/policy_loss" not in metrics:
            continue
        step = [row for row in kept() if (row["kind"], row["step"]) == ("update", metrics["step"])]
        assert len(step) == 6
        learned = [row for row in step if row["advantage"] != 0]
        if learned:
            pairs = [pair for row in learned for pair in zip(row["token_weight"], row["token_entropy"], strict=True)]
            mean = sum(weight * entropy for weight, entropy in pairs) / sum(weight for weight, _ in pairs)
            assert mean == pytest.approx(metrics["policy/entropy"], rel=1e-4)
        assert not any(any(row["token_clipped"]) for row in step), "ratios are 1"
        assert loss_of(step) == pytest.approx(metrics["policy/policy_loss"], abs=1e-5)
        assert sum(row["reward"] for row in step) / 6 == pytest.approx(metrics["reward/mean"])
        assert {row["version_first"] for row in step} == {metrics["step"] - 1}
        assert all(row["seconds"] > 0 for row in step)
        for row in step:
            assert sum(row["token_reward"]) == pytest.approx(row["reward"])
            trainers = row["token_trainer_logprob"]
            if row["advantage"] == 0:  # the update leaves out groups without spread
                assert set(trainers) == set(row["token_entropy"]) == {None}
            else:
                assert trainers == pytest.approx(row["token_logprob"], abs=1e-4)
            assert "".join(row["token_text"]) == row["prompt"] + "".join(row["token_text"][row["prompt_tokens"] :])
    found = read_run(Path("out"))
    assert found is not None
    assert (found["status"], found["steps"], found["continued_from"]) == (RunStatus.FINISHED, 3, None)
    assert train("--ckpt.overwrite", "--logger.trajectories_max_gib", "0") == 0
    assert names() == []
    assert not Path("out/profile").exists()


def test_several_optimizer_steps_have_the_weights_of_each(workspace: Path) -> None:
    """Each optimizer step's weights sum to 1, and the trainer's own log-probs are there."""
    assert train("--train.batch_size", "3", "--train.max_epochs", "2", "--train.max_steps", "1") == 0
    step = [row for row in kept() if row["kind"] == "update"]
    assert sum(sum(row["token_weight"]) for row in step) == pytest.approx(2.0)
    for row in step:
        for kind, ours, theirs in zip(
            row["token_kind"], row["token_logprob"], row["token_trainer_logprob"], strict=True
        ):
            assert kind != 1 or ours == pytest.approx(theirs, abs=1e-4)


def test_a_killed_run_leaves_whole_files_and_a_continued_one_no_later_ones(
    workspace: Path, rollgrad_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed while it rolls out its third step; the second is then repeated from an older state."""
    monkeypatch.setenv("KILLED_AT", "14")  # of 6 in each step
    command = [*rollgrad_command, "train", "rl", "--config", "run.yaml"]
    killed = subprocess.run(
        [*command, "--eval.dataset", "None"], capture_output=True, timeout=WAIT_SECONDS, check=False
    )
    assert killed.returncode < 0, killed.stderr.decode()
    found = read_run(Path("out"))
    assert found is not None
    assert found["status"] is RunStatus.RUNNING  # until its heartbeat is old
    before = names()
    assert before[0] == "step-000001"
    assert all(row["step"] <= 3 for row in kept())
    monkeypatch.delenv("KILLED_AT")
    Path("out/trajectories/step-000003.parquet").write_bytes(b"of a step that is repeated")
    assert train("--ckpt.resume", "--eval.dataset", "None") == 0
    assert names() == ["step-000001", "step-000002", "step-000003"]
    assert [sum(row["step"] == step for row in kept()) for step in (1, 2, 3)] == [6, 6, 6]
    found = read_run(Path("out"))
    assert found is not None
    assert found["status"] is RunStatus.FINISHED
    assert found["continued_from"] in (1, 2)


def test_an_error_is_in_the_record(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise ValueError('no reward')\n")
    assert train("--eval.dataset", "None") == 2
    found = read_run(Path("out"))
    assert found is not None
    assert found["status"] is RunStatus.FAILED
    assert "no reward" in found["reason"]
    capsys.readouterr()
    assert main(["inspect", "out"]) == 0
    assert capsys.readouterr().out.startswith("out: failed after 0 of 3 steps (")


def test_reports_on_the_way_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = 0.0, list[float]()

    def report(*_: Any) -> None:
        nonlocal now
        now += 20.0  # of a run with very many rollouts
        written.append(now)

    monkeypatch.setattr(training, "report_aside", report)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now))
    save = training._reporting(Path("out"), "a run")
    while now < 20_000.0:
        now += 10.0
        save()
    assert len(written) == 10
    assert sum(20.0 for _ in written) <= 0.011 * now


def test_a_report_is_written_when_a_state_is_saved(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed later has one, too; it is written beside the run, which keeps its memory."""
    seen: list[bool] = []

    def aside(*place: Any) -> None:
        Path("out/report.html").unlink(missing_ok=True)
        reporting.report_aside(*place)
        seen.append(Path("out/report.html").exists())

    monkeypatch.setattr(training, "report_aside", aside)
    monkeypatch.setattr(training, "REPORT_SECONDS", 0.0)
    assert train("--train.max_steps", "3", "--eval.dataset", "None") == 0
    assert seen == [True]  # after the first step; one after the second would take more than its share of the time


def test_a_report_that_cannot_be_written_on_the_way_is_a_warning(workspace: Path) -> None:
    Path("out/report.html").mkdir(parents=True)
    Path("out/metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 0.5}\n')
    with structlog.testing.capture_logs() as said:
        reporting.report_aside(Path("out").absolute(), "a run")
    (line,) = said
    assert line["event"] == "no report could be written"
    assert "report.html cannot be written" in line["reason"]
