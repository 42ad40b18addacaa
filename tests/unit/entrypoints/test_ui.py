"""The server of the page of runs: what it answers, to whom, and what it makes of broken runs."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import rollgrad
from rollgrad.adapters.servers.server import Server
from rollgrad.adapters.servers.ui import create_ui_app, needs_token
from rollgrad.adapters.tracking.metrics_file import LoggedMetrics
from rollgrad.adapters.tracking.trajectory_files import trajectory_files
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.held_out import EVALUATION_RULES
from rollgrad.domain.control.signs import RULES
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.ui import tunnel
from rollgrad.entrypoints.run_record import SILENT_SECONDS, RunRecord
from rollgrad.entrypoints.ui.run_view import EVIDENCE
from rollgrad.entrypoints.ui.runs import Runs, newest_run
from tests.kept_rollouts import group, usual_run, write_rollouts

KEY = "step/1/0/1/0"
SECONDS = 60.0


@asynccontextmanager
async def served(root: Path, token: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """Serves the runs below a directory, with a page of one file."""
    static = root / ".static"
    static.mkdir(exist_ok=True)
    (static / "index.html").write_text("<p>the page</p>")
    stopping = asyncio.Event()
    app = create_ui_app(Runs(root), static, stopping)
    server = Server(app, token=token, name="page", guarded=needs_token)
    url = await server.start()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=SECONDS) as client:
            yield client
    finally:
        stopping.set()
        await server.stop()


async def asked(root: Path, *paths: str) -> list[Any]:
    """Returns the answers to some requests, as JSON."""

    async with served(root) as client:
        return [(await client.get(path)).json() for path in paths]


async def test_the_page_and_all_that_it_asks_are_served(tmp_path: Path) -> None:
    usual_run(tmp_path / "first")

    async with served(tmp_path) as client:
        page = await client.get("/")
        assert page.text == "<p>the page</p>"
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        assert page.headers["x-content-type-options"] == "nosniff"
        (run,) = (await client.get("/api/runs")).json()["runs"]
        assert (run["id"], run["step"], run["status"], run["trajectories"]) == ("first", 2, "unknown", True)
        base = "/api/run/first"
        about = (await client.get(base)).json()
        assert (about["update_steps"], about["eval_steps"], about["rows"]) == ([1, 2], [0, 2], 12)
        assert about["parts"] == ["format"]
        assert {"name": "reward", "type": "number", "text": "sum of the branch's rewards"} in about["columns"]
        metrics = (await client.get(f"{base}/metrics?since=1&names=reward/mean")).json()
        assert metrics["series"] == {"reward/mean": {"steps": [2], "values": [0.375]}}
        listed = (await client.get(f"{base}/trajectories", params={"filter": "reward = 1", "size": 2})).json()
        assert (listed["total"], listed["matched"], len(listed["rows"])) == (12, 4, 2)
        following = (await client.get(f"{base}/trajectories?filter=reward=1&size=3&page=1")).json()
        assert len(following["rows"]) == 1
        whole = (await client.get(f"{base}/trajectory/{KEY}")).json()
        assert whole["step_totals"]["logged_loss"] == pytest.approx(whole["step_totals"]["loss"], abs=1e-6)
        assert len((await client.get(f"{base}/group/step/1/0")).json()["rows"]) == 4
        (prompt,) = (await client.get(f"{base}/compare")).json()["prompts"]
        assert (await client.get(f"{base}/compare/{prompt['prompt_id']}")).json()["prompt"] == "Held out? "
        assert (await client.get(f"{base}/points?x=step&y=reward")).json()["matched"] == 12
        assert (await client.get("/api/filter")).json()["help"]
        assert (await client.get(f"{base}/findings")).json() == {"findings": []}


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/run/first/trajectories?filter=rewrd<1", 400, "invalid_filter"),
        ("/api/run/first/trajectories?sort=rewrd", 400, "invalid_filter"),
        ("/api/run/first/trajectories?page=x", 400, "invalid_number"),
        ("/api/run/first/points?x=nothing", 400, "invalid_filter"),
        ("/api/run/first/trajectory/step/9/9/9/9", 404, "not_found"),
        ("/api/run/first/group/step/9/9", 404, "not_found"),
        (f"/api/run/first/group/step/{10**20}/9", 404, "not_found"),
        (f"/api/run/first/group/step/9/{10**20}", 404, "not_found"),
        ("/api/run/first/compare/nothing", 404, "not_found"),
        ("/api/run/other", 404, "not_found"),
        ("/api/run/..", 404, None),
        ("/../pyproject.toml", 404, None),
        ("/%2e%2e/metrics.jsonl", 404, None),
    ],
)
async def test_what_cannot_be_answered_is_one_sentence(
    path: str, status: int, code: str | None, tmp_path: Path
) -> None:
    usual_run(tmp_path / "first")

    async with served(tmp_path) as client:
        answer = await client.get(path)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == code
        assert error["message"].endswith((".", "?"))
        assert "\n" not in error["message"]


async def test_notes_are_the_only_thing_that_is_written(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "first")

    async with served(tmp_path) as client:
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        path = "/api/run/first/notes"
        noted = await client.post(path, json={"key": KEY, "star": True, "tags": ["hack"]})
        assert noted.json() | {"time": None} == {
            "key": KEY,
            "star": True,
            "tags": ["hack"],
            "note": None,
            "time": None,
        }
        assert (await client.get(path)).json()["notes"][KEY]["star"] is True
        for change in ({"star": True}, {"key": "step/9/9/9/9", "star": True}, {"key": KEY, "star": "yes"}):
            assert (await client.post(path, json=change)).status_code in (404, 422)
        for method in ("PUT", "DELETE", "POST"):
            assert (await client.request(method, "/api/run/first")).status_code == 405
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert {path.name for path in after.keys() - before.keys()} == {"notes.jsonl"}
        assert {path: after[path] for path in before} == before


async def test_runs_need_the_token_and_the_page_does_not(tmp_path: Path) -> None:
    usual_run(tmp_path / "first")

    async with served(tmp_path, token="open-sesame") as client:
        assert (await client.get("/")).status_code == 200
        for path in ("/api/runs", "/%61pi/runs", "/api/run/first/events", "/api/run/first/trajectory/" + KEY):
            assert (await client.get(path)).status_code == 401
        headers = {"Authorization": "Bearer open-sesame"}
        assert (await client.get("/api/runs", headers=headers)).status_code == 200
        assert (await client.get("/api/runs", headers={"Host": "evil.example"})).status_code == 421


async def test_events_tell_of_a_step_and_of_a_note(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "first")

    async with served(tmp_path) as client, client.stream("GET", "/api/run/first/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: "))
        assert (await anext(events))["step"] == 2
        write_rollouts(run, {3: [group(8, {"new": 1.0})]})
        changed: set[str] = set()
        while not {"trajectories", "metrics"} <= changed:  # the two files may come in one event or in two
            event = await anext(events)
            changed |= set(event["changed"])
        assert event["step"] == 3
        await client.post("/api/run/first/notes", json={"key": KEY, "star": True})
        assert (await anext(events))["changed"] == ["notes"]


async def test_a_killed_run_is_shown_as_crashed(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "first")
    with RunRecord(run, learning={"steps": 9}):
        (shown,) = (await asked(tmp_path, "/api/runs"))[0]["runs"]
        assert (shown["status"], shown["steps"]) == ("running", 9)
        facts = json.loads((run / "run.json").read_text())
    assert SILENT_SECONDS < 30
    old = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - SILENT_SECONDS - 1))
    (run / "run.json").write_text(json.dumps(facts | {"status": "running", "heartbeat": old, "boot": None}))
    (shown,) = (await asked(tmp_path, "/api/runs"))[0]["runs"]
    assert shown["status"] == "crashed"
    assert shown["heartbeat_age"] > SILENT_SECONDS


async def test_broken_files_are_named_and_the_rest_works(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "first")
    path = trajectory_files(run)[1]
    path.write_bytes(path.read_bytes()[:200])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], '{"step": oh', "\x00", lines[1], '{"step": 3, "rew']))
    (run / "run.json").write_text("[" * 100_000)
    (run / "config.yaml").write_text("a: [")
    (run / "notes.jsonl").write_bytes(b'\xff\n{}\n"text"\n[]\n')
    about, metrics, listed = await asked(
        tmp_path, "/api/run/first", "/api/run/first/metrics", "/api/run/first/trajectories?filter=reward=1"
    )
    assert metrics["broken_lines"] == 2
    assert metrics["series"]["reward/mean"]["steps"] == [1, 2]
    assert "line 2, 3" in about["problems"][0]
    assert path.name in about["problems"][1]
    assert listed["problems"] == about["problems"][1:]
    assert listed["matched"] == 2


async def test_hostile_text_and_numbers_without_value_are_answered(tmp_path: Path) -> None:
    text = "<script>alert(1)</script> \x1b[31m \u202e \x00 \ud800"
    write_rollouts(tmp_path / "first", {1: [group(0, {"<script>": 1.0}, prompt="<b>")]})
    line = json.dumps({"step": 1, "prompt": text, "response": text, "label": text, "reward": float("nan")})
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "samples.jsonl").write_text(line)
    first, second = await asked(tmp_path, "/api/run/first/trajectories", "/api/run/second/trajectories")
    assert first["rows"][0]["response"] == "<script>"
    assert second["rows"][0]["response"].startswith("<script>alert(1)</script> \x1b[31m \u202e \x00 \\ud800")
    assert second["rows"][0]["reward"] is None


def test_a_run_that_begins_while_its_directory_is_shown_appears(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.listed()["runs"] == []
    usual_run(tmp_path)
    listed = runs.listed()
    assert listed["single"]
    assert [row["id"] for row in listed["runs"]] == [tmp_path.name]


def test_a_long_run_is_listed_without_keeping_its_series_and_drawn_with_few_points(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": float(step)}) for step in range(1, 301)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    view = Runs(tmp_path).view(tmp_path.name)
    assert (view.row()["step"], len(view.row()["rewards"])) == (300, 60)
    assert not any(isinstance(made, LoggedMetrics) for _, made in view._kept.values())
    assert view.metrics(points=4)["series"]["train/loss"]["steps"] == [1, 100, 200, 300]
    assert len(view.metrics()["series"]["train/loss"]["steps"]) == 300


def test_the_best_evaluation_is_of_the_mean_score_where_no_share_of_passes_changes(tmp_path: Path) -> None:
    def best(scores: list[float], passes: list[float]) -> dict[str, object]:
        lines = [
            json.dumps({"step": step, "eval/pass@1": passed, "eval/mean@1": score})
            for step, (score, passed) in enumerate(zip(scores, passes, strict=True))
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        found: dict[str, object] = Runs(tmp_path).view(tmp_path.name).row()["eval"]
        return found

    assert best([0.1, 0.4, 0.3], [0.0, 0.0, 0.0]) == {
        "metric": "eval/mean@1",
        "best": 0.4,
        "best_step": 1,
        "last": 0.3,
    }
    assert best([0.1, 0.4, 0.6], [0.0, 0.5, 0.2])["metric"] == "eval/pass@1"
    assert best([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])["metric"] == "eval/pass@1"


@pytest.mark.parametrize("ended", ["2026-01-01T10:00:05+00:00", "2026-01-01T09:00:00+00:00"])
def test_the_time_of_a_run_is_that_of_its_steps_where_the_record_has_less(tmp_path: Path, ended: str) -> None:
    """The last process of a run that continues took five seconds, or its clock was set back."""
    lines = [json.dumps({"step": step, "time/step_s": 10.0}) for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    view = Runs(tmp_path).view(tmp_path.name)
    assert view.row()["seconds"] == 30.0
    facts = {"status": "finished", "started": "2026-01-01T10:00:00+00:00", "heartbeat": ended, "ended": ended}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert view.row()["seconds"] == 30.0
    (tmp_path / "run.json").write_text(json.dumps(facts | {"ended": "2026-01-01T10:00:40+00:00"}))
    assert view.row()["seconds"] == 40.0


def test_of_a_finding_that_comes_and_goes_the_newest_times_are_listed(tmp_path: Path) -> None:
    steps = range(1, 301)
    cut = {step: float(step % 6 < 3) for step in steps}  # in three rollouts of six
    lines = [
        json.dumps({"step": step, "rollout/truncated_share": cut[step], "rollout/response_length_mean": 9.0})
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    listed = Runs(tmp_path).view(tmp_path.name).findings()["findings"]
    assert [(found["since"], found["before"]) for found in listed] == [(282, 46), (288, 0), (294, 0)]


def test_findings_of_a_run_that_goes_on_or_is_set_back_are_those_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[int] = []
    observe = LearningWatch.observe

    def counted(self: LearningWatch, step: int, metrics: Any) -> Any:
        observed.append(step)
        return observe(self, step, metrics)

    def lines(*shares: float) -> str:
        rows = enumerate(shares, start=1)
        return "".join(
            json.dumps({"step": n, "rollout/truncated_share": share, "rollout/response_length_mean": 9.0}) + "\n"
            for n, share in rows
        )

    log = tmp_path / "metrics.jsonl"
    facts = {"status": "running", "heartbeat": "2026-01-01T10:00:00+00:00", "learning": {"steps": 100}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    log.write_text(lines(1.0, 1.0))
    view = Runs(tmp_path).view(tmp_path.name)
    monkeypatch.setattr(LearningWatch, "observe", counted)
    assert view.findings() == {"findings": []}
    with log.open("a") as file:
        file.write(lines(1.0, 1.0, 1.0).splitlines(keepends=True)[-1])
    (found,) = view.findings()["findings"]
    assert (found["since"], found["until"], found["holds"]) == (1, 3, True)
    assert observed == [1, 2, 3], "each step once"
    assert view.row()["findings"] == [found["evidence"]], "the list of runs tells them, too"
    log.write_text(lines(0.0, 0.0, 0.0, 0.0))
    assert view.findings() == {"findings": []}
    assert view.row()["findings"] == []


async def test_a_data_source_for_each_prompt_makes_no_longer_answer(tmp_path: Path) -> None:
    for name, groups in (("few", 1), ("many", 100)):
        write_rollouts(tmp_path / name, {1: [group(number, {"7": 1.0, "8": 0.0}) for number in range(groups)]})
    few, many = await asked(tmp_path, "/api/run/few", "/api/run/many")
    assert (few["rows"], many["rows"]) == (2, 200)
    assert "source 99" not in json.dumps(many)
    lists = ("metrics", "parts", "metric_columns", "columns", "update_steps", "eval_steps")
    assert {name: many[name] for name in lists} == {name: few[name] for name in lists}


async def test_files_that_a_run_removes_while_they_are_counted_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = usual_run(tmp_path / "first")
    walk = os.walk

    def meanwhile(top: Path) -> Any:
        for parent, folders, names in walk(top):
            yield parent, folders, [*names, ".step-000003.parquet.new"]

    monkeypatch.setattr(os, "walk", meanwhile)
    (about,) = await asked(tmp_path, "/api/run/first")
    kept = sum(path.stat().st_size for path in trajectory_files(run))
    assert {"name": "trajectories/", "bytes": kept} in about["files"]


def test_runs_are_found_below_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual_run(tmp_path / "runs" / "sweep" / "one")
    usual_run(tmp_path / "runs" / "two")
    (tmp_path / "runs" / "two" / "model").mkdir()
    (tmp_path / "runs" / "two" / "model" / "run.json").write_text("{}")
    usual_run(tmp_path / "runs" / "profile")  # which is no directory of another run
    runs = Runs(tmp_path / "runs")
    usual_run(tmp_path / "runs" / "sweep~one")
    assert {row["id"] for row in runs.listed()["runs"]} == {"profile", "sweep~one", "sweep~.one", "two"}
    assert runs.view("sweep~one").directory == tmp_path / "runs" / "sweep" / "one"
    assert runs.view("sweep~.one").directory == tmp_path / "runs" / "sweep~one"
    with pytest.raises(DataError, match="no run 'model'"):
        runs.view("model")
    single = Runs(tmp_path / "runs" / "two")
    assert [row["id"] for row in single.listed()["runs"]] == ["two"]
    monkeypatch.chdir(tmp_path)
    for name, later in (("sweep/one", 10), ("two", 20), ("sweep/one", 30)):
        (Path("runs") / name / "run.json").write_text("{}")
        changed = time.time() + later
        os.utime(Path("runs") / name / "run.json", (changed, changed))
        assert newest_run() == Path("runs") / name
    with pytest.raises(DataError, match="no run below elsewhere"):
        newest_run(Path("elsewhere"))


def test_the_newest_of_very_many_runs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgrad.entrypoints.ui.runs.MOST_RUNS", 2)
    for age, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
        os.utime(tmp_path / name / "metrics.jsonl", (age, age))
    runs = Runs(tmp_path)
    listed = runs.listed()
    assert [row["id"] for row in listed["runs"]] == ["d", "c"]
    assert listed["problems"] == ["These are the newest 2 of 4 runs: name a directory with fewer."]
    assert runs.view("a").id == "a"


def test_a_wrong_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ui", "elsewhere"]) == 2
    assert capsys.readouterr().err.startswith("error: 'elsewhere' is no directory")
    assert main(["ui"]) == 2
    assert "error: There is no run below runs" in capsys.readouterr().err
    usual_run(tmp_path / "runs" / "one")
    assert main(["ui", "--host", "0.0.0.0"]) == 2
    assert "no token protects it" in capsys.readouterr().err


def test_a_notebook_shows_the_page_with_a_token_of_its_own(tmp_path: Path) -> None:
    usual_run(tmp_path / "first")
    page = rollgrad.show(tmp_path / "first", height=500)
    try:
        address, _, token = page.url.partition("/#token=")
        assert page._repr_html_().startswith(f'<iframe src="{address}/#token={token}"')
        assert token not in repr(page)
        assert httpx2.get(f"{address}/", timeout=SECONDS).status_code == 200
        assert httpx2.get(f"{address}/api/runs", timeout=SECONDS).status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        (run,) = httpx2.get(f"{address}/api/runs", headers=headers, timeout=SECONDS).json()["runs"]
        assert run["id"] == "first"
    finally:
        page.close()
    page.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(address, timeout=SECONDS)
    with pytest.raises(DataError, match="no directory"):
        rollgrad.show(tmp_path / "missing")


def test_an_ssh_session_gets_the_way_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert tunnel("http://127.0.0.1:7890", "127.0.0.1") == []
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 51234 10.0.0.5 22")
    monkeypatch.setenv("LOGNAME", "me")
    assert tunnel("http://127.0.0.1:7890", "127.0.0.1") == [
        "from your machine: ssh -N -L 7890:127.0.0.1:7890 me@10.0.0.5"
    ]


def test_every_finding_has_a_metric_that_shows_it() -> None:
    assert set(EVIDENCE) == {*RULES, *EVALUATION_RULES}
