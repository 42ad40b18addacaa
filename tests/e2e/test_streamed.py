"""Trainers over examples that are read while training goes on: they learn what prepared ones teach."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

import rollgrad
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kd import KDRun, TeacherConfig
from rollgrad.application.settings.kto import KTORun, KTOSettings, UnpairedLoss
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import PairwiseRewardConfig, RMRun
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import ExampleEvalConfig, ExampleFormat
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.offline import reference as composition
from tests.example_runs import Stopping, logged, small, weights, written

ROWS, STEPS = 6, 3


def pair(number: int) -> dict[str, Any]:
    answers = {"chosen": f"It is {2 * number}.", "rejected": "I do not know." + "!" * (number % 3)}
    return {"prompt": f"What is {number} plus {number}?", **answers, "margin": number / 10, "weight": 1 + number % 2}


def reply(number: int) -> dict[str, Any]:
    completion = "I do not know." if number % 2 else f"It is {2 * number}."
    return {"prompt": f"What is {number} plus {number}?", "completion": completion, "label": not number % 2}


def solution(number: int) -> dict[str, Any]:
    steps = [f"There are {number}.", f"So it is {2 * number}."]
    return {"prompt": f"What is {number} plus {number}?", "completions": steps, "labels": [True, number % 2]}


@frozen
class Case:
    """A trainer, its settings and its rows."""

    train: Callable[..., Any]
    run: Callable[[Path], OfflineRun]
    row: Callable[[int], Mapping[str, Any]]


CASES = {
    "dpo": Case(rollgrad.train_dpo, lambda model: DPORun(), pair),
    "rm": Case(rollgrad.train_rm, lambda model: RMRun(rm=PairwiseRewardConfig(margin=True)), pair),
    "kto": Case(rollgrad.train_kto, lambda model: KTORun(kto=KTOSettings(loss=UnpairedLoss.APO_ZERO)), reply),
    "prm": Case(rollgrad.train_prm, lambda model: PRMRun(), solution),
    "kd": Case(rollgrad.train_kd, lambda model: KDRun(teacher=TeacherConfig(model_name_or_path=str(model))), reply),
}


def settings(run: OfflineRun, model: Path, data: Path, output: Path, *, stream: bool = True) -> Any:
    small(run, model, data, output, lr=1e-3, batch_size=ROWS)
    run.train.num_epochs, run.train.max_steps = 1, STEPS
    run.data.stream = stream
    if isinstance(run, KDRun):
        run.data.format = ExampleFormat.COMPLETION
    return run


def losses(output: Path) -> list[float]:
    return [row["train/loss"] for row in logged(output) if "train/loss" in row]


@pytest.mark.parametrize("name", CASES)
def test_each_step_is_that_of_prepared_rows(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A step has all rows, so that their order makes no difference."""
    case = CASES[name]
    data = written(tmp_path / "rows.jsonl", [case.row(number) for number in range(ROWS)])
    for stream in (False, True):
        run = settings(case.run(tiny_model_dir), tiny_model_dir, data, tmp_path / str(stream), stream=stream)
        case.train(run)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), abs=1e-5)
    assert len(losses(tmp_path / "True")) == STEPS
    prepared, streamed = weights(tmp_path / "False"), weights(tmp_path / "True")
    for weight, tensor in prepared.items():
        torch.testing.assert_close(streamed[weight], tensor, rtol=0, atol=3e-4)


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_run_with_a_live_reference_goes_on_where_it_ended(
    name: str, adapters: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The reference is still the model that training began with, and held-out rows are compared with it as well."""
    case = CASES[name]
    data = written(tmp_path / "rows.jsonl", [case.row(number) for number in range(ROWS)])

    def run(output: str, resume: Resume = Resume.NEVER) -> Any:
        made: Any = DPORun() if name == "dpo" else KTORun()
        made = settings(made, tiny_model_dir, data, tmp_path / output)
        made.train.batch_size, made.data.shuffle_buffer, made.ckpt.resume = 4, 4, resume
        made.actor.lora = LoraConfig(rank=4 if adapters else 0)
        made.eval = ExampleEvalConfig(dataset=str(data))
        return made

    whole = case.train(run("whole"))
    with pytest.raises(CheckpointError, match="disk is full"):
        case.train(run("parts"), sink=Stopping(after=2))
    case.train(run("parts", Resume.ALWAYS))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[2:], "the sink that stopped it wrote none before"
    assert losses(tmp_path / "whole")[0] == pytest.approx(0.5 if name == "kto" else 0.6931472, abs=1e-5)
    assert whole.after["eval/loss"] < whole.before["eval/loss"]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[weight]) for weight, tensor in weights(tmp_path / "parts").items())


def test_another_reference_than_the_model_is_noticed(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "rows.jsonl", [pair(number) for number in range(ROWS)])
    score = composition.LiveReference.logprobs
    monkeypatch.setattr(
        composition.LiveReference, "logprobs", lambda self, given: [each - 1 for each in score(self, given)]
    )
    with pytest.raises(ConfigurationError, match="the loss would not begin at log 2"):
        rollgrad.train_dpo(settings(DPORun(), tiny_model_dir, data, tmp_path / "run"))


def test_a_loss_without_a_reference_loads_none(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "rows.jsonl", [pair(number) for number in range(ROWS)])
    scored: list[object] = []
    monkeypatch.setattr(TorchPolicy, "score", lambda self, batch: scored.append(batch))
    run = settings(DPORun(), tiny_model_dir, data, tmp_path / "run")
    run.dpo.loss, run.train.max_steps = ("simpo",), 1
    rollgrad.train_dpo(run)
    assert not scored
    assert len(losses(tmp_path / "run")) == 1


def test_what_needs_all_rows_is_refused(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "rows.jsonl", [pair(number) for number in range(ROWS)])
    run = settings(KTORun(), tiny_model_dir, data, tmp_path / "run")
    with pytest.raises(DataError, match="pairs, which are two replies each, but a streamed row is one"):
        rollgrad.train_kto(run)
    model = ["--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(data), "--data.stream"]
    refused = {
        "kto": ["--kto.balance"],
        "dpo": ["--data.pairs", "all"],
        "kd": ["--teacher.model_name_or_path", "t", "--kd.cache", "--kd.top_k", "4"],
    }
    for trainer, flags in refused.items():
        assert main(["train", trainer, *model, *flags]) == 2
        error = capsys.readouterr().err
        assert "leave --" in error
        assert "--data.stream out" in error
        assert "set --train.max_steps" in error
    assert main(["train", "kto", *model, "--train.max_steps", "1", "--dry_run"]) == 2
    assert "leave --data.stream out" in capsys.readouterr().err
    assert main(["train", "dpo", *model, "--train.max_steps", "1", "--dry_run"]) == 0
    assert "the first 6" in capsys.readouterr().out
