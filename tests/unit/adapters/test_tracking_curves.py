"""The image of a run's curves: which are drawn."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rollgrad.adapters.tracking.curves import draw_curves
from rollgrad.adapters.tracking.metrics_file import read_metrics


@pytest.fixture(autouse=True)
def _all_charts(whole_reports: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    whole_reports(monkeypatch)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the titles of the charts that are drawn of some rows."""

    def titles(rows: list[dict[str, Any]]) -> list[str]:
        figures: list[Figure] = []
        save: Any = FigureCanvasAgg.print_png

        def kept(self: Any, image: Path) -> None:
            figures.append(self.figure)
            save(self, image)

        monkeypatch.setattr(FigureCanvasAgg, "print_png", kept)
        image = draw_curves(metrics_file(tmp_path, rows), tmp_path / "curves.png", title="a <b> & c")
        assert image.read_bytes().startswith(b"\x89PNG")
        return [axes.get_title(loc="left") for axes in figures[-1].axes if axes.get_title(loc="left")]

    return titles


def metrics_file(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_only_metrics_that_were_logged_are_drawn(drawn: Any) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "reward/mean": n / 30, "policy/entropy": None} for n in range(30)]
    rows[0]["eval/pass@1"] = 0.1
    assert drawn(rows) == ["Reward", "Evaluation"]
    assert drawn([]) == []


def test_scores_that_are_not_0_or_1_are_drawn_beside_the_share_that_passes(drawn: Any) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "eval/pass@1": 0.0, "eval/mean@2": 0.0} for n in range(2)]
    assert drawn(rows) == ["Evaluation"]
    rows[1]["eval/mean@2"] = 5.5
    assert drawn(rows) == ["Evaluation", "Held-out score"]


def test_what_held_out_examples_say_is_drawn_of_every_trainer(drawn: Any) -> None:
    pairs = [{"step": 0, "eval/loss": 0.7, "eval/accuracy": 0.5}]  # as of dpo, kto and rm: no eval/nll
    assert drawn(pairs) == ["Held-out loss", "Held-out accuracy"]
    steps = [{"step": 0, "eval/loss": 0.7, "eval/step_accuracy": 0.5}]
    assert drawn(steps) == ["Held-out loss", "Held-out judged steps"]


def test_everything_there_is_fits_in_one_image(drawn: Any) -> None:
    keys = ["reward/mean", "eval/pass@1", "rollout/entropy", "policy/approx_kl", "policy/ref_kl", "policy/grad_norm"]
    keys += ["rollout/response_length_mean", "rollout/truncated_share", "time/generate_s", "time/update_s"]
    assert len(drawn([{"step": n, "time/step_s": 9.0, **dict.fromkeys(keys, 1.0 + n)} for n in range(3)])) == 8


def test_a_continued_run_counts_with_its_last_values_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    path = metrics_file(tmp_path, [{"step": 2, "a": 1.0}, {"step": 1, "a": 5.0}, {"step": 2, "a": 3.0, "b": None}])
    with path.open("a") as file:
        file.write('{"step": 3, "a"')
    assert read_metrics(path) == {"a": {1: 5.0, 2: 3.0}}


def test_a_divergence_that_is_zero_by_construction_is_no_chart_but_a_reward_of_zero_is(drawn: Any) -> None:
    rows = [{"step": n, "reward/mean": 0.0, "policy/approx_kl": 0.0} for n in range(3)]
    assert drawn(rows) == ["Reward"]
    rows[1]["policy/approx_kl"] = 1e-4
    assert drawn(rows) == ["Reward", "KL divergence"]
