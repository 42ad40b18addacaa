"""Experiment trackers: the packages themselves, as far as they work without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.beside import beside

SECRET = "sesame-of-the-command-line"
ROOT = Path(__file__).resolve().parents[2]


def run_script(directory: Path, *trackers: str, **variables: str) -> subprocess.CompletedProcess[str]:
    home = directory / "home"
    home.mkdir(parents=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "SWANLAB", "MLFLOW"))},
        "HOME": str(home),
        "PYTHONPATH": f"{beside('trackers')}{os.pathsep}{ROOT}",
        "TRACKIO_DIR": str(directory / "trackio"),
        "MLFLOW_TRACKING_URI": (directory / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        **variables,
    }
    command = [sys.executable, str(ROOT / "tests" / "tracker_script.py"), str(directory), *trackers, "--secret", SECRET]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_every_tracker_has_metrics_samples_and_settings_of_a_run_and_of_its_continuation_that_fails(
    tmp_path: Path,
) -> None:
    done = run_script(tmp_path, "wandb", "trackio", "mlflow", "swanlab")
    everything = json.loads(done.stdout.splitlines()[-1])
    for name, kept in everything.items():
        assert dict(kept["points"]) == {1: 0.25, 2: 0.5, 3: 0.75}, name
        assert [kept[what] for what in ("project", "name", "group")] == ["sums", "first", "all"], name
        texts = {(sample["step"], sample["prompt"], sample["response"]) for sample in kept["samples"]}
        assert texts == {(step, "What is 1 + 1?", "It is 2.") for step in (1, 2, 3)}, name
        assert kept["failed"] == ([False, True] if name in ("wandb", "swanlab") else [True]), name
        assert kept["reason"] == "OutOfMemory: at https://***host/rows.jsonl", name
        assert kept["settings"]["train"]["seed"] == 42, name
        assert kept["settings"]["data"]["dataset"] == "https://***@host/rows.jsonl", name
    assert everything["mlflow"]["evaluations"] == ["eval/of _/pass_at_4"]
    for name in ("wandb", "mlflow"):
        assert everything[name]["when_continued"] == [False, None], f"{name}: it has not failed after all"
    for name in ("wandb", "swanlab"):  # the others have one run only
        first, second = everything[name]["ids"]
        assert first == second
        assert f"{name} records this run in {tmp_path / name}, which `{name} sync` sends" in done.stdout
    assert everything["swanlab"]["printed"] == []
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert sorted(ids) == ["mlflow", "swanlab", "trackio", "wandb"]
    assert "a-password" not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for secret in ("a-password", SECRET):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_tracker_whose_server_does_not_answer_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    nowhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = run_script(tmp_path, "trackio", "mlflow", "--read", "trackio", **nowhere)
    assert done.stdout.count("mlflow gets no more metrics; all are in metrics.jsonl") == 2  # once in each of two runs
    kept = json.loads(done.stdout.splitlines()[-1])["trackio"]
    assert [step for step, _ in kept["points"]] == [1, 2, 2, 3]
