"""`rollgrad inspect`: the state of a run from its directory, however it ended."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.run_directory import no_run
from rollgrad.entrypoints.run_record import SILENT_SECONDS, RunRecord
from rollgrad.entrypoints.ui.runs import Runs
from tests.unit.domain.test_sick_runs import SICK, run_of

LEARNING = {"steps": 50, "judged_by_outcome": True, "max_new_tokens": 24, "held_by_kl": True}


def logged(directory: Path, steps: Sequence[dict[str, float]]) -> Path:
    """A run's directory with these metrics, an evaluation before them, and a line that was cut off."""
    lines = [json.dumps({"step": 0, "eval/pass@1": 0.25})]
    lines += [json.dumps({"step": step, **metrics}) for step, metrics in enumerate(steps, 1)]
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "rew']))
    return directory


def inspected(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", str(directory), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", SICK)
def test_what_the_console_said_is_found_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path, run_of(SICK[name], seed=0))
    with RunRecord(tmp_path, learning=LEARNING):
        pass
    assert {finding["name"] for finding in inspected(tmp_path, capsys)["findings"]} == {name}


def test_a_run_is_shown_as_text_and_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = logged(
        tmp_path / "run", [{"reward/mean": step / 10, "time/sync_s": 0.1, "time/step_s": 1.0} for step in range(1, 8)]
    )
    with RunRecord(run, learning=LEARNING) as record:
        record.interrupted("SIGTERM")
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: interrupted after 7 of 50 steps (SIGTERM)"
    assert lines[3].split() == ["reward/mean", "0.1", "0.7", "0.1", "0.7"]
    phases = [line.split()[:2] for line in lines if line.startswith("time/")]
    assert phases == [["time/sync_s", "0.1"], ["time/step_s", "1"]]
    assert lines[-1] == "no findings"
    assert main(["inspect", str(run), "--md"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"# {run}: interrupted")
    assert "| eval/pass@1 | 0.25 | 0.25 | 0.25 | 0.25 |" in page


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunRecord(tmp_path, learning=LEARNING):
        assert inspected(tmp_path, capsys)["status"] == "running"
        beating = json.loads((tmp_path / "run.json").read_text())
    old = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 2 * SILENT_SECONDS))
    (tmp_path / "run.json").write_text(json.dumps(beating | {"heartbeat": old, "boot": None}))
    found = inspected(tmp_path, capsys)
    assert found["status"] == "died"
    assert "no heartbeat for" in found["reason"]


def test_a_run_of_an_earlier_version_has_metrics_and_samples_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(tmp_path, run_of(SICK["constant_reward"], seed=0))
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "prompt": "How?", "response": "So", "reward": 1.0}\n')
    found = inspected(tmp_path, capsys)
    assert (found["status"], found["steps"], found["of"]) == ("unknown", 40, None)
    assert [finding["name"] for finding in found["findings"]] == ["constant_reward"]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "heartbeat": "x"}))
    assert inspected(tmp_path, capsys)["status"] == "unknown"


@pytest.mark.parametrize(
    ("file", "text", "steps"),
    [
        ("samples.jsonl", '{"step": 7, "prompt": "How?", "response": "So", "reward": 1.0}\n{"step": 9, "pro', 7),
        ("metrics.jsonl", "", 0),
        ("run.json", "{}", 0),
        ("trajectories/step-000003.parquet", "", 3),
    ],
)
def test_what_the_page_shows_as_a_run_is_inspected(
    file: str, text: str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert Runs(tmp_path).single
    found = inspected(tmp_path, capsys)
    assert (found["status"], found["steps"], found["curves"]) == ("unknown", steps, {})


def test_a_file_that_was_changed_by_hand_is_no_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path, run_of(SICK["constant_reward"], seed=0))
    with RunRecord(tmp_path, learning=LEARNING | {"steps": "many", "max_new_tokens": None}):
        pass
    assert [finding["name"] for finding in inspected(tmp_path, capsys)["findings"]] == ["constant_reward"]
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert main(["inspect", str(tmp_path)]) == 2
    assert "metrics.jsonl cannot be read (Is a directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["inspect", "nowhere"], "'nowhere' holds no run"),
        (["inspect"], "rollgrad inspect runs/first"),
        (["inspect", "nowhere", "other"], "inspect takes one run, but there are nowhere, other"),
        (["report", "nowhere", "other"], "see several side by side with rollgrad ui"),
        (["inspect", "--json", "nowhere"], "'nowhere' holds no run"),
        (["report", "--output", "x.html", "nowhere"], "'nowhere' holds no run"),
        (["ui", "--port", "0", "nowhere"], "'nowhere' is no directory"),
        (["ui", "nowhere", "other"], "ui takes one directory"),
        (["export", "--min_score", "1", "pairs", "nowhere"], "nowhere"),
        (["inspect", "nowhere", "--json", "--md"], "leave one of them out"),
        (["inspect", "nowhere", "--jsn"], "did you mean --json?"),
    ],
)
def test_what_cannot_be_inspected_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


def test_runs_near_a_directory_without_one_are_named(tmp_path: Path) -> None:
    def run(name: str) -> Path:
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
        return tmp_path / name

    first = run("a")
    assert str(no_run(tmp_path)).endswith(f"did you mean {first}?")
    assert str(no_run(first / "model")).endswith(f"did you mean {first}?")
    names = ", ".join(map(str, [first, *(run(name) for name in "bcde")][:3]))
    assert str(no_run(tmp_path)).endswith(f"name one of {names} or one of 2 more.")


def test_the_mean_of_rewards_that_are_not_0_or_1_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path, [{"reward/mean": 0.5}])
    rows = [{"step": step, "eval/pass@1": 0.0, "eval/mean@1": step - 0.5} for step in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = inspected(tmp_path, capsys)["curves"]["eval/mean@1"]
    assert (curve["first"], curve["last"]) == (-0.5, 0.5)
