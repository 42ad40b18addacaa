"""Several held-out datasets are measured together, and each as if it were alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.algorithms import evaluation
from rollgrad.entrypoints.composition.offline.dpo import dpo_container
from rollgrad.entrypoints.composition.offline.rm import rm_container
from rollgrad.entrypoints.composition.offline.sft import sft_container
from tests.example_runs import small, written


def dpo() -> DPORun:
    made = DPORun()
    made.dpo.loss = ("sigmoid", "sft")  # whose shares in the step differ
    return made


TRAINERS: dict[str, tuple[Callable[[], OfflineRun], Callable[[Any], Any]]] = {
    "sft": (SFTRun, sft_container),
    "dpo": (dpo, dpo_container),
    "rm": (RMRun, rm_container),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_set_is_measured_as_if_it_were_alone(
    trainer: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, container_of = TRAINERS[trainer]

    def row(number: int) -> dict[str, Any]:
        replies = {"chosen": f"It is {number}." * (1 + number % 3), "rejected": "I do not know."}
        answers = {"completion": replies["chosen"]} if trainer == "sft" else replies
        return {"prompt": f"What is {number}?", "weight": 1 + number % 2, **answers}

    first = written(tmp_path / "first.jsonl", [row(number) for number in range(3)])
    second = written(tmp_path / "second.jsonl", [row(number) for number in range(10, 15)])

    def measured(dataset: str) -> dict[str, float]:
        settings = small(make(), tiny_model_dir, first, tmp_path / "run", lr=1e-3, batch_size=2)
        settings.train.max_tokens_per_micro_batch = 100
        settings.eval.dataset = dataset
        found: dict[str, float] = asyncio.run(container_of(settings).evaluation().run())
        return found

    both, alone = measured(f"{first},{second}"), {path.stem: measured(str(path)) for path in (first, second)}
    for name, metrics in alone.items():
        assert {f"eval/{name}/{metric.removeprefix('eval/')}" for metric in metrics} < both.keys()
        for metric, value in metrics.items():
            assert both[f"eval/{name}/{metric.removeprefix('eval/')}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    if trainer == "sft":  # rows of one file may say themselves where they are from
        named = [{**row(number), "datasource": "first" if number < 10 else None} for number in (0, 10, 1, 11, 2)]
        rest = [{**row(number), "datasource": "second"} for number in (12, 13, 14)]
        one, other = written(tmp_path / "second.jsonl", named), written(tmp_path / "rest.jsonl", rest)
        assert measured(f"{one},{other}") == pytest.approx(both, rel=1e-4, abs=1e-6)
        monkeypatch.setattr(evaluation, "MOST_SETS", 1)
        with capture_logs() as logs:
            together = measured(f"{first},{second}")
        assert together.keys() == {name for name in both if name.count("/") == 1}
        assert [log["event"] for log in logs if "of 2 datasets, such as 'first'" in log["event"]]
    losses = sorted(metrics["eval/loss"] for metrics in alone.values())
    assert losses[0] < both["eval/loss"] < losses[1]
