"""`rollgrad train kto` as a user runs it, with a real (tiny) model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.application.settings.kto import KTORun, KTOSettings, UnpairedLoss
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import ExampleEvalConfig, ExampleTrainConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.cli.main import main
from tests.e2e.test_dpo import PREFERENCES, ROOT, scored
from tests.example_runs import Stopping, logged, small, weights, written

_ = scored
LABELS, BATCH, STEPS = 20, 8, 5


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    rows = [
        {
            "prompt": f"What is {a} plus {a}?",
            "completion": "I do not know." if a % 2 else f"The answer is {2 * a}.",
            "label": not a % 2,
        }
        for a in range(LABELS)
    ]
    return written(tmp_path / "labelled.jsonl", rows)


def settings(model: Path, data: Path, output: Path, **kto: Any) -> KTORun:
    return small(KTORun(kto=KTOSettings(**kto)), model, data, output, lr=1e-3, batch_size=BATCH)


def test_a_model_learns_what_is_good(tiny_model_dir: Path, labelled: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, labelled, tmp_path / "run")
    run.eval = ExampleEvalConfig(dataset=str(labelled), steps=3, max_samples=6)
    result = rollgrad.train_kto(run)
    assert result.steps == STEPS
    rows = logged(tmp_path / "run")
    trained = [row for row in rows if "train/loss" in row]
    assert trained[0]["train/loss"] == pytest.approx(0.5, abs=1e-5), "nothing differs from the reference yet"
    assert trained[0]["train/kl"] == pytest.approx(0, abs=1e-4)
    assert result.before["eval/loss"] == pytest.approx(0.5, abs=1e-5)
    assert result.after["eval/loss"] < 0.45
    assert {name.removeprefix("eval/") for name in result.after} == set(KTORun().evaluated())
    assert result.after["eval/accuracy"] == 1.0
    assert result.after["eval/desirable_reward"] > result.after["eval/undesirable_reward"] + 0.5
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 5]


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    tiny_model_dir: Path,
    labelled: Path,
    tmp_path: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    calls: list[str] = request.getfixturevalue("scored")
    whole = rollgrad.train_kto(settings(tiny_model_dir, labelled, tmp_path / "whole"))
    calls.clear()
    run = settings(tiny_model_dir, labelled, tmp_path / "run")
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_kto(run, sink=Stopping(after=3))
    # The reference's log-probs were found: the passes are that of the start, and one a step, on mismatched replies.
    assert calls == ["TorchPolicy"] * (1 + 3)
    if cache == "lost":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    calls.clear()
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_kto(run)
    assert result.steps == STEPS
    # Of lost log-probs the reference computes those of the replies, and those of the mismatched ones that are to come.
    assert calls == ([] if cache == "kept" else ["TorchReference"] * 2) + ["TorchPolicy"] * (STEPS - 3)
    assert all(torch.equal(a, weights(result.output_dir)[name]) for name, a in weights(whole.output_dir).items())


def test_a_reference_follows_the_policy(tiny_model_dir: Path, labelled: Path, tmp_path: Path) -> None:
    """One that becomes the policy after every second step compares with what was learned since then alone, of the
    replies and of the mismatched ones, of examples and of held-out ones."""
    run = settings(tiny_model_dir, labelled, tmp_path / "run", ref_sync_steps=2, ref_mixup=1.0)
    run.eval = ExampleEvalConfig(dataset=str(labelled), steps=1, max_samples=6)
    run.train.max_tokens_per_micro_batch = 60
    rollgrad.train_kto(run)
    rows = logged(tmp_path / "run")
    for name, since in (("train", [0, 1, 0, 1, 0]), ("eval", [0, 1, 0, 1, 0, 1])):
        losses = [row[f"{name}/loss"] for row in rows if f"{name}/loss" in row]
        rewards = [row[f"{name}/desirable_reward"] for row in rows if f"{name}/loss" in row]
        kl = [row[f"{name}/kl"] for row in rows if f"{name}/loss" in row]
        assert [loss != pytest.approx(0.5, abs=1e-4) for loss in losses] == since
        assert [reward != pytest.approx(0, abs=1e-4) for reward in rewards] == since
        assert all(each == pytest.approx(0, abs=1e-4) for each, moved in zip(kl, since, strict=True) if not moved)
    assert not list((tmp_path / "cache").rglob("reference")), "nothing of a reference that moves is kept"
    run.ckpt.best_metric, run.train.enable_ema, run.ref.model_name_or_path = "eval/loss", True, str(tiny_model_dir)
    with pytest.raises(ConfigurationError) as error:
        rollgrad.train_kto(run)
    for words in (
        "--kto.ref_sync_steps or --ckpt.best_metric out",
        "one average of the weights",
        "begins as the policy",
    ):
        assert words in str(error.value)


def test_any_budget_of_tokens_gives_the_same_steps(tiny_model_dir: Path, labelled: Path, tmp_path: Path) -> None:
    found = []
    for budget in (60, 16384):
        run = settings(tiny_model_dir, labelled, tmp_path / str(budget), undesirable_weight=0.01)
        run.train.max_tokens_per_micro_batch, run.train.max_steps, run.train.num_epochs = budget, 3, 1
        rollgrad.train_kto(run)
        rows = [row for row in logged(tmp_path / str(budget)) if "train/loss" in row]
        found.append([[row[f"train/{name}"] for name in ("loss", "kl", "grad_norm")] for row in rows])
    assert found[0][-1][1] > 0, "all replies became likelier, also behind other prompts"
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_pairs_adapters_and_a_loss_without_distance(
    tiny_model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    calls: list[str] = request.getfixturevalue("scored")
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"What is {a} plus {a}?", "chosen": f"It is {2 * a}.", "rejected": "No idea."} for a in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = settings(tiny_model_dir, path, tmp_path / "run", loss=UnpairedLoss.APO_ZERO)
    run.actor.lora, run.actor.adam.lr = LoraConfig(rank=4), 1e-2
    run.train = ExampleTrainConfig(batch_size=5, num_epochs=1)
    result = rollgrad.train_kto(run)
    assert result.steps == 3, "twelve replies"
    assert calls == ["TorchPolicy"] * 2, "the adapters begin as nothing; no step measures a distance"
    trained = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert trained[0]["train/loss"] == pytest.approx(0.5, abs=1e-5)
    assert {row["train/kl"] for row in trained} == {0.0}
    assert sum(row["train/desirable_share"] * size for row, size in zip(trained, (5, 5, 2), strict=True)) == (
        pytest.approx(6)
    )
    assert (result.model / "adapter" / "adapter_model.safetensors").exists()


def test_good_and_bad_replies_that_do_not_weigh_the_same(
    tiny_model_dir: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in labelled.read_text().splitlines()]
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"] or row["prompt"][8] == "1"))
    # Ten good replies and six bad ones: of 1, 11, 13, 15, 17 and 19.
    run = settings(tiny_model_dir, labelled, tmp_path / "run")
    run.train = ExampleTrainConfig(batch_size=BATCH, max_steps=1)
    rollgrad.train_kto(run)
    said = " ".join(capsys.readouterr().err.split())
    assert "The 10 good replies weigh 1.67 times as much as the 6 bad ones" in said
    assert "--kto.desirable_weight between 0.6 and 0.8" in said
    run = settings(tiny_model_dir, labelled, tmp_path / "balanced", balance=True)
    run.train = ExampleTrainConfig(batch_size=16, max_steps=1)
    rollgrad.train_kto(run)
    assert "good replies weigh" not in capsys.readouterr().err
    (trained,) = [row for row in logged(tmp_path / "balanced") if "train/loss" in row]
    assert trained["train/loss"] == pytest.approx(0.5 * (10 + 6 * 10 / 6) / 16, abs=1e-5)
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"]))
    run = settings(tiny_model_dir, labelled, tmp_path / "good", balance=True)
    with pytest.raises(DataError, match=r"All 10 replies .* are good.*--kto.balance"):
        rollgrad.train_kto(run)


def test_a_step_of_one_reply_is_refused(tiny_model_dir: Path, labelled: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, labelled, tmp_path / "run")
    run.train = ExampleTrainConfig(batch_size=19)
    with pytest.raises(ConfigurationError, match=r"last of 2 steps has one reply alone \(20 replies"):
        rollgrad.train_kto(run)
    run.train = ExampleTrainConfig(batch_size=4)
    run.eval = ExampleEvalConfig(dataset=str(labelled), max_samples=1)
    with pytest.raises(ConfigurationError, match=r"eval.dataset has one reply alone"):
        rollgrad.train_kto(run)
    run = settings(tiny_model_dir, labelled, tmp_path / "run")
    run.data.max_samples, run.train = 1, ExampleTrainConfig(batch_size=4, max_steps=2)
    with pytest.raises(ConfigurationError, match=r"data.dataset has one reply alone.*--data.max_samples"):
        rollgrad.train_kto(run)


def test_the_command_line(
    tiny_model_dir: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "kto", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(labelled)]
    output = ["--ckpt.output_dir", str(tmp_path / "run"), "--train.batch_size", "6", "--actor.dtype", "float32"]
    assert main([*words, *output, "--train.max_steps", "1"]) == 0
    assert (tmp_path / "run" / "model" / "config.json").exists()
    capsys.readouterr()
    assert main([*words, "--dry_run", "--ckpt.output_dir", str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert "⟦The answer is 0.<|im_end|>⟧" in shown
    assert "row 1, good: " in shown
    assert main([*words, "--dry_run", "--train.batch_size", "19"]) == 2
    assert "has one reply alone" in capsys.readouterr().err
    wrong = ["--kto.loss", "kto", "--kto.balance", "--kto.desirable_weight", "2", "--train.batch_size", "1"]
    assert main([*words, *wrong]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors if line.startswith("error:")] == [
        "kto.desirable_weight",
        "train.batch_size",
    ]


def test_the_example_in_its_smallest_form(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two steps with the example's settings and replies, on a model that is tiny."""
    words = ["train", "kto", "--config", str(ROOT / "examples" / "kto.yaml")]
    data = [f"--data.dataset={PREFERENCES}_train.jsonl", f"--eval.dataset={PREFERENCES}_test.jsonl"]
    model = ["--actor.model_name_or_path", str(tiny_model_dir), "--actor.dtype", "float32", "--actor.adam.lr", "1e-3"]
    small = ["--train.max_steps", "2", "--train.batch_size", "4", "--data.max_samples", "8", "--eval.max_samples", "2"]
    assert main([*words, *data, *model, *small, "--ckpt.output_dir", str(tmp_path / "run")]) == 0
    held_out = [row["eval/loss"] for row in logged(tmp_path / "run") if "eval/loss" in row]
    assert held_out[0] == pytest.approx(0.5, abs=1e-5)
    assert held_out[-1] < held_out[0]
