"""The report of a run: the page with data of its own, in one file of bounded size."""

import base64
import json
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.tracking.browse import index
from rollgrad.adapters.tracking.browse.notes import write_note
from rollgrad.adapters.tracking.trajectory_files import trajectory_files
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.ui import report
from rollgrad.entrypoints.ui.report import write_run_report
from rollgrad.entrypoints.ui.run_view import RunView
from tests.kept_rollouts import group, usual_run, write_rollouts


@pytest.fixture(autouse=True)
def _whole(whole_reports: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    whole_reports(monkeypatch)


def data_of(page: Path) -> dict[str, Any]:
    """Returns the data in a report, as the page reads them."""
    found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def long_run(run: Path, steps: int = 3) -> Path:
    """Writes a run of more rollouts than a report has room for; their texts do not deflate."""
    rng = random.Random(0)

    def reply() -> str:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(40))

    updates = {
        step: [group(100 * step + number, {reply(): rng.random() for _ in range(4)}) for number in range(30)]
        for step in range(1, steps + 1)
    }
    return write_rollouts(run, updates)


def test_a_report_tells_what_the_server_does(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run")
    write_note(run, "step/1/1/10/0", {"star": True})
    data = data_of(write_run_report(run))
    view = RunView(run, id="run", name="run")
    assert data["run"]["name"] == "run"
    assert data["metrics"] == view.metrics()
    assert data["findings"] == view.findings()
    assert data["compare"]["prompts"] == view.compared()["prompts"]
    assert data["compared"] == {
        prompt["prompt_id"]: view.replies_to(prompt["prompt_id"]) for prompt in data["compare"]["prompts"]
    }
    assert data["notes"]["step/1/1/10/0"]["star"] is True
    assert data["trajectories"]["total"] == 12
    kept = {row["key"] for row in data["trajectories"]["rows"]}
    assert kept == set(data["trajectory"])
    assert len(kept) == 10, "all of the updates"
    for key, row in data["trajectory"].items():
        whole = view.trajectory(key)
        tokens, stored = row["tokens"], whole["tokens"]
        assert row | {"tokens": None} == whole | {"tokens": None}
        if stored is not None:
            assert tokens["weight"] == pytest.approx(stored["weight"], rel=1e-5)
            assert tokens["text"] == stored["text"]


def test_a_report_looks_for_files_as_often_of_a_run_with_many_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for those of a long run takes as long as reading one prompt's replies."""
    looked: list[Path] = []
    monkeypatch.setattr(index, "trajectory_files", lambda run: looked.append(run) or trajectory_files(run))
    counts = []
    for prompts in (1, 20):
        groups = [group(number, {"7": 1.0}, prompt=f"{number}? ") for number in range(prompts)]
        run = write_rollouts(tmp_path / str(prompts), {1: groups}, {0: groups, 1: groups})
        assert len(data_of(write_run_report(run))["compared"]) == prompts
        counts.append(len(looked))
        looked.clear()
    assert counts[0] == counts[1]


def test_a_report_has_whole_groups_and_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = long_run(tmp_path / "run")
    noted = "step/2/217/2170/0"
    write_note(run, noted, {"tags": ["odd"]})
    data = data_of(write_run_report(run))
    assert len(data["trajectory"]) == report.MOST_ROLLOUTS
    monkeypatch.setattr(report, "MOST_BYTES", 400_000)
    page = write_run_report(run)
    assert page.stat().st_size <= 400_000
    data = data_of(page)
    groups: dict[str, int] = {}
    for key in data["trajectory"]:
        groups[key.rsplit("/", 2)[0]] = groups.get(key.rsplit("/", 2)[0], 0) + 1
    assert set(groups.values()) == {4}
    assert noted in data["trajectory"]
    assert {row["step"] for row in data["trajectories"]["rows"]} == {1, 2, 3}


def test_long_curves_are_thinned_with_their_ends(tmp_path: Path) -> None:
    values = {step: 999.0 if step == 777 else step / 7 for step in range(1, 4001)}
    lines = [json.dumps({"step": step, "reward/mean": value}) for step, value in values.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    series = data_of(write_run_report(tmp_path))["metrics"]["series"]["reward/mean"]
    assert len(series["steps"]) == len(series["values"]) == report.MOST_POINTS + 1
    assert 777 in series["steps"], "the greatest value is shown, whichever points are"
    assert (series["steps"][0], series["steps"][-1]) == (1, 4000)
    assert all(value == values[step] for step, value in zip(series["steps"], series["values"], strict=True))


def test_broken_files_are_named_in_the_report(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run")
    trajectory_files(run)[1].write_bytes(b"PAR1")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{oh\n{}\n")
    data = data_of(write_run_report(run))
    assert any(trajectory_files(run)[1].name in problem for problem in data["trajectories"]["problems"])
    assert data["metrics"]["broken_lines"] == 2
    assert data["trajectory"]


def test_the_command_writes_a_report_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = usual_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert main(["report", str(run), "--output", str(tmp_path / "mail.html")]) == 0
    assert data_of(tmp_path / "mail.html")["run"]["id"] == "run"
    for words, sentence in (
        (["report"], "report takes the directory of a run"),
        (["report", str(tmp_path / "missing")], "holds no run"),
        (["report", str(run), "--output", str(tmp_path / "missing" / "a.html")], "cannot be written"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
