"""`rollgrad train dpo` as a user runs it, with a real (tiny) model."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import ExampleEvalConfig
from rollgrad.application.settings.sections.optimizer import LRScheduler
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.domain.ports.models import TokenScores
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.offline.dpo import dpo_container
from tests.example_runs import Stopping, logged, small, weights, written

PAIRS, BATCH, STEPS = 18, 6, 6
ROOT = Path(__file__).resolve().parents[2]
PREFERENCES = ROOT / "examples" / "data" / "preferences"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"What is {a} plus {a}?", "chosen": f"The answer is {2 * a}.", "rejected": "I do not know."}
        for a in range(PAIRS)
    ]
    return written(tmp_path / "pairs.jsonl", rows)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who scored batches without training: the policy, or a reference of its own."""
    calls: list[str] = []

    def counting(kind: type[TorchPolicy] | type[TorchReference]) -> None:
        score = kind.score

        def counted(self: Any, batch: PackedBatch) -> TokenScores:
            calls.append(kind.__name__)
            return score(self, batch)

        monkeypatch.setattr(kind, "score", counted)

    counting(TorchPolicy)
    counting(TorchReference)
    return calls


def settings(model: Path, data: Path, output: Path, **dpo: Any) -> DPORun:
    return small(DPORun(dpo=PreferenceSettings(**dpo)), model, data, output, lr=1e-3, batch_size=BATCH)


def test_a_model_learns_what_is_preferred(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, pairs, tmp_path / "run")
    run.eval = ExampleEvalConfig(dataset=str(pairs), steps=3, max_samples=5)
    result = rollgrad.train_dpo(run)
    assert result.steps == STEPS
    rows = logged(tmp_path / "run")
    trained = [row for row in rows if "train/loss" in row]
    assert trained[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert result.before["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert (result.before["eval/accuracy"], result.after["eval/accuracy"]) == (0.0, 1.0)
    assert result.after["eval/reward_margin"] > 0.5
    assert {name.removeprefix("eval/") for name in result.after} == set(DPORun().evaluated())
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6]
    assert result.report is not None
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["data.dataset"]["used"] == PAIRS
    assert report["data.dataset"]["branched_rows"] == 0
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(result.model).num_parameters() > 0


def test_the_reference_is_computed_once_and_found_again(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, scored: list[str]
) -> None:
    first = rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "first"))
    passes = scored.count("TorchPolicy")  # one for the reference, one for the comparison at the start
    assert passes == 2
    assert "TorchReference" not in scored, "the actor is its own reference until it is trained"
    second = rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "second"))
    assert scored.count("TorchPolicy") == passes + 1
    assert weights(first.output_dir).keys() == weights(second.output_dir).keys()
    assert all(torch.equal(a, weights(second.output_dir)[name]) for name, a in weights(first.output_dir).items())


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, scored: list[str]
) -> None:
    whole = rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "whole"))
    run = settings(tiny_model_dir, pairs, tmp_path / "run")
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_dpo(run, sink=Stopping(after=4))
    if cache == "lost":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    scored.clear()
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_dpo(run)
    assert result.steps == STEPS
    # The trained model is no reference: where the log-probs are lost, the one it began as is loaded for them.
    assert scored == ([] if cache == "kept" else ["TorchReference"])
    assert all(torch.equal(a, weights(result.output_dir)[name]) for name, a in weights(whole.output_dir).items())


def test_adapters_begin_as_the_model_without_them(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, scored: list[str]
) -> None:
    run = settings(tiny_model_dir, pairs, tmp_path / "run")
    run.actor.lora = LoraConfig(rank=4)
    run.actor.adam.lr = 1e-2
    with pytest.raises(CheckpointError):
        rollgrad.train_dpo(run, sink=Stopping(after=4))
    (tmp_path / "cache").rename(tmp_path / "moved")  # the reference, with the adapters off, is computed again
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_dpo(run)
    assert "TorchReference" not in scored
    rows = [row for row in logged(result.output_dir) if "train/loss" in row]
    assert [row["step"] for row in rows] == [5, 6]
    assert rows[-1]["train/accuracy"] == 1.0
    assert (result.model / "adapter" / "adapter_model.safetensors").exists()
    whole = settings(tiny_model_dir, pairs, tmp_path / "whole")
    whole.actor.lora, whole.actor.adam.lr = LoraConfig(rank=4), 1e-2
    uninterrupted = weights(rollgrad.train_dpo(whole).output_dir)
    first = next(row for row in logged(tmp_path / "whole") if "train/loss" in row)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert all(torch.equal(a, weights(result.output_dir)[name]) for name, a in uninterrupted.items())


def test_a_reference_of_its_own(tiny_model_dir: Path, pairs: Path, tmp_path: Path, scored: list[str]) -> None:
    trained = rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "first"))
    scored.clear()
    run = settings(trained.model, pairs, tmp_path / "second")
    run.ref.model_name_or_path = str(tiny_model_dir)
    result = rollgrad.train_dpo(run)
    assert scored == [], "the first run kept the log-probs of the same model"
    first = next(row for row in logged(result.output_dir) if "train/loss" in row)
    assert first["train/reward_margin"] > 0.3, "the second run goes on from the first one's distance"
    short = tmp_path / "short"
    shutil.copytree(tiny_model_dir, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 60}))
    run.ref.model_name_or_path, run.ckpt.overwrite = str(short), True
    with pytest.raises(ConfigurationError, match=r"The reference .*has 60 positions, but examples may have"):
        rollgrad.train_dpo(run)


def test_log_probs_of_another_model_are_refused(
    tiny_model_dir: Path,
    pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ScoreFiles.load
    rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "first"))
    monkeypatch.setattr(ScoreFiles, "load", lambda self, key: [score - 1 for score in load(self, key)])
    with pytest.raises(ConfigurationError, match=r"differ from the reference's by 1 a token.*log 2"):
        rollgrad.train_dpo(settings(tiny_model_dir, pairs, tmp_path / "second"))


def test_losses_without_a_reference_compute_none(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, scored: list[str]
) -> None:
    run = settings(tiny_model_dir, pairs, tmp_path / "run", loss=("simpo", "sft"), loss_weights=(1.0, 0.2))
    result = rollgrad.train_dpo(run)
    assert scored == []
    rows = [row for row in logged(result.output_dir) if "train/loss" in row]
    assert rows[-1]["train/simpo_loss"] < rows[0]["train/simpo_loss"]
    assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/simpo_loss"] + 0.2 * rows[0]["train/chosen_nll"])


def test_the_command_line(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "dpo", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(pairs)]
    output = ["--ckpt.output_dir", str(tmp_path / "run"), "--train.batch_size", "6", "--actor.dtype", "float32"]
    assert main([*words, *output, "--train.max_steps", "2", "--dpo.loss", "sigmoid", "sft"]) == 0
    assert str(tmp_path / "run") in capsys.readouterr().out
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert main([*words, "--dry_run", "--ckpt.output_dir", str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert "⟦The answer is 0.<|im_end|>⟧" in shown
    assert "row 1, chosen: " in shown
    assert "row 1, rejected: " in shown
    assert not (tmp_path / "other").exists()
    wrong = ["--dpo.loss", "dpo", "--dpo.beta", "-1", "--train.batch_size", "0"]
    assert main([*words, *wrong]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors if line.startswith("error:")] == [
        "dpo.beta",
        "train.batch_size",
        "dpo.loss",
    ]


def test_rows_that_are_no_pairs_are_counted_and_named(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    with pairs.open("a") as file:
        file.write('{"prompt": "a", "chosen": "b", "rejected": "b"}\n{"prompt": "a", "chosen": "b"}\nnot JSON\n')
    run = settings(tiny_model_dir, pairs, tmp_path / "run")
    with pytest.raises(DataError, match=r"3 of 21 rows .*equal_replies: 1 .*pairs.jsonl:19"):
        rollgrad.train_dpo(run)
    run.data.max_dropped = 0.2
    result = rollgrad.train_dpo(run)
    report = json.loads((result.output_dir / "data_report.json").read_text())["data.dataset"]
    assert {reason: drop["count"] for reason, drop in report["dropped"].items()} == {"equal_replies": 1, "broken": 2}


def test_the_example_in_its_smallest_form(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One step with the example's settings and pairs, on a model that is tiny."""
    words = ["train", "dpo", "--config", str(ROOT / "examples" / "dpo.yaml")]
    data = [f"--data.dataset={PREFERENCES}_train.jsonl", f"--eval.dataset={PREFERENCES}_test.jsonl"]
    model = ["--actor.model_name_or_path", str(tiny_model_dir), "--actor.dtype", "float32", "--actor.adam.lr", "1e-3"]
    small = ["--train.max_steps", "2", "--train.batch_size", "2", "--data.max_samples", "8", "--eval.max_samples", "2"]
    assert main([*words, *data, *model, *small, "--ckpt.output_dir", str(tmp_path / "run")]) == 0
    held_out = [row["eval/loss"] for row in logged(tmp_path / "run") if "eval/loss" in row]
    assert held_out[0] == pytest.approx(math.log(2), abs=1e-5)
    assert held_out[-1] < held_out[0]


def by_tr_dpo(run: DPORun, *, steps: int) -> tuple[list[float], Any]:
    """(the loss of each step, the trained model) of TR-DPO by transformers and torch alone, all pairs a step: after
    every so many steps the reference is mixed with the policy (arXiv:2404.09656, eq. 6)."""
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(run.actor.model_name_or_path, dtype=torch.float32).eval() for _ in range(2)
    )
    assert run.actor.adam.lr is not None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=run.actor.adam.lr, betas=(0.9, 0.95), weight_decay=0.0)
    found = dpo_container(run).pairs()
    replies = [reply for index in range(len(found)) for reply in found[index].replies]

    def logprobs(network: Any) -> torch.Tensor:
        sums = []
        for reply in replies:
            scores_TV = network(reply.token_ids_T[None]).logits[0, :-1].log_softmax(-1)
            own_T = scores_TV.gather(1, reply.token_ids_T[1:, None])[:, 0]
            sums.append((own_T * reply.weights_T[1:]).sum())
        return torch.stack(sums).view(-1, 2)

    losses = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            before = logprobs(reference)
        ratios = logprobs(policy) - before
        loss = -torch.nn.functional.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert run.dpo.ref_sync_steps is not None
        if step % run.dpo.ref_sync_steps == 0:
            with torch.no_grad():
                for mine, its in zip(reference.parameters(), policy.parameters(), strict=True):
                    mine.mul_(1 - run.dpo.ref_mixup).add_(its, alpha=run.dpo.ref_mixup)
    return losses, policy


def test_a_reference_follows_the_policy(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    """Step for step as written out, also where the run ended early; held-out pairs have the reference as it is."""

    def run(name: str, **dpo: Any) -> DPORun:
        made = settings(tiny_model_dir, pairs, tmp_path / name, **dpo)
        made.train.batch_size, made.train.num_epochs = PAIRS, 5
        made.actor.lr_scheduler, made.actor.lr_warmup_ratio, made.actor.max_norm = LRScheduler.CONSTANT, 0.0, 0.0
        made.eval = ExampleEvalConfig(dataset=str(pairs))
        return made

    moving: dict[str, Any] = {"ref_sync_steps": 2, "ref_mixup": 0.7}
    whole = rollgrad.train_dpo(run("whole", **moving))
    losses = [row["train/loss"] for row in logged(tmp_path / "whole") if "train/loss" in row]
    wanted, policy = by_tr_dpo(run("whole", **moving), steps=5)
    assert losses == pytest.approx(wanted, abs=1e-4)
    assert losses[2] > losses[1], "a reference that has come nearer has less of a margin"
    saved = weights(whole.output_dir)
    for name, parameter in policy.named_parameters():
        if name in saved:
            torch.testing.assert_close(saved[name], parameter.detach(), rtol=0, atol=1e-4)
    assert not (whole.model / "ema").exists()
    assert not list((tmp_path / "cache").rglob("reference")), "nothing of a reference that moves is kept"
    parts = run("parts", **moving)
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_dpo(parts, sink=Stopping(after=3))
    parts.ckpt.resume = Resume.ALWAYS
    rollgrad.train_dpo(parts)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(tmp_path / "parts").items())
    ended = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert ended["eval/loss"] == pytest.approx(whole.after["eval/loss"])
    still = rollgrad.train_dpo(run("still"))
    assert whole.after["eval/reward_margin"] < still.after["eval/reward_margin"]


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_ranks_are_those_of_the_whole_step(tiny_model_dir: Path, pairs: Path, tmp_path: Path, loss: str) -> None:
    """However few tokens a pass has."""
    found = []
    for budget in (16384, 60):
        run = settings(tiny_model_dir, pairs, tmp_path / f"run{budget}", loss=(loss,))
        run.train.max_tokens_per_micro_batch, run.train.max_steps, run.train.num_epochs = budget, 3, 1
        run.eval = ExampleEvalConfig(dataset=str(pairs), max_samples=5)
        result = rollgrad.train_dpo(run)
        found.append([row["train/loss"] for row in logged(tmp_path / f"run{budget}") if "train/loss" in row])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0][0] == pytest.approx(math.log(2), abs=1e-4)
    assert found[0][-1] < found[0][0]
    assert result.after["eval/loss"] < result.before["eval/loss"]


def test_pairs_that_weigh_differently_are_not_ranked(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) | {"weight": 1 + number % 2} for number, line in enumerate(pairs.open())]
    run = settings(tiny_model_dir, written(tmp_path / "weighed.jsonl", rows), tmp_path / "run", loss=("aot",))
    with pytest.raises(DataError, match="leave the column weight out"):
        rollgrad.train_dpo(run)


def test_pairs_count_by_what_the_policy_would_write(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, pairs, tmp_path / "run", wpo=True)
    run.train.max_steps, run.train.num_epochs = 1, 1
    rollgrad.train_dpo(run)
    (row,) = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert row["train/loss"] == pytest.approx(math.log(2) * row["train/wpo_weight"], rel=1e-3)
    assert row["train/entropy"] > 1
    assert 0 <= row["train/chosen_token_accuracy"] <= 1
