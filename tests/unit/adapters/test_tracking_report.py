"""The report: what it shows, and that it needs nothing but itself."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollgrad.adapters.tracking import report
from rollgrad.adapters.tracking.report import read_metrics, write_report


@pytest.fixture(autouse=True)
def _all_charts(charts_of_reports: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PANELS", charts_of_reports)


def metrics_file(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def captions(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?) <span>", page)


def test_only_metrics_that_were_logged_are_drawn(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "reward/mean": n / 30, "policy/entropy": None} for n in range(30)]
    rows[0]["eval/pass@1"] = 0.1
    page = write_report(metrics_file(tmp_path, rows), tmp_path / "out", title="Run", before=None, after=None)
    assert page == tmp_path / "out" / "report.html"
    assert captions(page.read_text()) == ["Reward", "Evaluation"]
    assert "<table>" not in page.read_text()


def test_everything_there_is_fits_in_one_page_that_asks_for_nothing(tmp_path: Path) -> None:
    keys = ["reward/mean", "eval/pass@1", "rollout/entropy", "policy/approx_kl", "policy/ref_kl", "policy/grad_norm"]
    keys += ["rollout/response_length_mean", "rollout/truncated_share", "time/generate_s", "time/update_s"]
    rows = [{"step": n, "time/step_s": 9.0, **dict.fromkeys(keys, 1.0 + n)} for n in range(3)]
    out = write_report(metrics_file(tmp_path, rows), tmp_path, title="a <b> & c", before={"x": 1}, after={"x": 3})
    page = out.read_text()
    assert len(captions(page)) == 8
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert not re.findall(r"<script|<link|<img|url\((?!#)|@import", page)
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    ids = [node.get("id") for chart in charts for node in ElementTree.fromstring(chart).iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#(.*?)\)", page)) <= set(ids)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_before_and_after_stand_side_by_side_with_their_difference(tmp_path: Path) -> None:
    page = write_report(
        metrics_file(tmp_path, []), tmp_path, title="t", before={"pass@1": 0.25, "old": 1.0}, after={"pass@1": 0.75}
    ).read_text()
    assert "<th>pass@1</th><td>0.25</td><td>0.75</td><td><b>+0.5</b></td>" in page
    assert "<th>old</th><td>1</td><td></td><td><b></b></td>" in page
    assert "No metrics were logged." in page


def test_a_continued_run_counts_with_its_last_values_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    path = metrics_file(tmp_path, [{"step": 2, "a": 1.0}, {"step": 1, "a": 5.0}, {"step": 2, "a": 3.0, "b": None}])
    with path.open("a") as file:
        file.write('{"step": 3, "a"')
    assert read_metrics(path) == {"a": {1: 5.0, 2: 3.0}}


def test_a_divergence_that_is_zero_by_construction_is_no_chart_but_a_reward_of_zero_is(tmp_path: Path) -> None:
    rows = [{"step": n, "reward/mean": 0.0, "policy/approx_kl": 0.0} for n in range(3)]
    page = write_report(metrics_file(tmp_path, rows), tmp_path, title="t", before=None, after=None).read_text()
    assert captions(page) == ["Reward"]
    rows[1]["policy/approx_kl"] = 1e-4
    page = write_report(metrics_file(tmp_path, rows), tmp_path, title="t", before=None, after=None).read_text()
    assert captions(page) == ["Reward", "KL divergence"]
