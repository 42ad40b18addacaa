"""`rollgrad train rm` as a user runs it, with real (tiny) models, and everything that reads what it saves."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

import rollgrad
from rollgrad.adapters.models.torch.loading.loading import load_critic
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.application.settings.rm import PairwiseRewardConfig, RMRun
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import ExampleEvalConfig
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import CheckpointError, DataError
from rollgrad.entrypoints.cli.main import main
from tests.example_runs import Stopping, logged, small, weights, written
from tests.tiny_models import make_tiny_tokenizer, tiny_llama

PAIRS, BATCH, STEPS = 18, 6, 6
CPU = torch.device("cpu")


def pair(number: int, **more: Any) -> dict[str, Any]:
    chosen = f"The answer is {2 * number}" + "!" * (number % 5)
    return {"prompt": f"What is {number} plus {number}?", "chosen": chosen, "rejected": "I do not know.", **more}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return written(tmp_path / "pairs.jsonl", [pair(number) for number in range(PAIRS)])


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return written(tmp_path / "held_out.jsonl", [pair(number) for number in range(40, 47)])


def settings(model: Path, data: Path, output: Path, held_out: Path | None = None) -> RMRun:
    run = RMRun(eval=ExampleEvalConfig(dataset=None if held_out is None else str(held_out)))
    return small(run, model, data, output, lr=3e-3, batch_size=BATCH)


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def texts(tokenizer: Any, held_out: Path) -> list[str]:
    """Both replies of the held-out pairs as the template writes them, up to the token that ends the turn."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
        for row in rows
        for key in ("chosen", "rejected")
    ]
    return [tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n") for chat in chats]


def make_model(padding: str, path: Path) -> Path:
    """A tiny model with another padding token: `own`, the one that ends a turn with another to spare, or with none."""
    tokenizer = make_tiny_tokenizer(spare=padding != "none to spare")
    if padding != "own":
        tokenizer.pad_token = tokenizer.eos_token
    return tiny_llama(tokenizer, path, head_dim=16)


@pytest.mark.parametrize("padding", ["own", "ends a turn", "none to spare"])
def test_everything_that_loads_the_model_reads_the_scores_that_were_trained(
    pairs: Path, held_out: Path, tmp_path: Path, padding: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = make_model(padding, tmp_path / "base")
    result = rollgrad.train_rm(settings(base, pairs, tmp_path / "run", held_out))
    config = json.loads((result.model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert list(config["id2label"]) == ["0"]
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    lines = texts(tokenizer, held_out)
    # One padded batch, as any program of transformers scores them.
    model, loading = AutoModelForSequenceClassification.from_pretrained(result.model, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = tokenizer(lines, padding=True, return_tensors="pt", add_special_tokens=False)
    assert len(set(tokens["attention_mask"].sum(1).tolist())) > 2, "replies of several lengths"
    with torch.no_grad():
        theirs = model.eval()(**tokens).logits[:, 0].tolist()
    # The scores that the last evaluation saw: from the weights in memory, packed, the prompt of a pair computed once.
    assert config["mean"] == pytest.approx(statistics.mean(theirs), abs=1e-4)
    assert config["std"] == pytest.approx(statistics.stdev(theirs), abs=1e-4)
    gaps = [chosen - rejected for chosen, rejected in zip(theirs[::2], theirs[1::2], strict=True)]
    assert result.after["eval/reward_gap"] == pytest.approx(statistics.mean(gaps), abs=1e-4)
    assert result.after["eval/accuracy"] == statistics.mean(gap > 0 for gap in gaps) == 1.0
    # Our own reward model, which `serve reward` and `train rl` load: from texts, and from a policy's tokens.
    ours = RewardModel.load(
        str(result.model), dtype=torch.float32, device=CPU, flag="model", policy_tokenizer=tokenizer
    )
    assert ours.score(lines) == pytest.approx(theirs, abs=1e-4)
    replies = [
        RewardInput(text="", token_ids=tuple(tokenizer(line, add_special_tokens=False)["input_ids"])) for line in lines
    ]
    assert [score for score, _ in ours.judge(replies)] == pytest.approx(theirs, abs=1e-4)
    normalised = RewardModel.load(
        str(result.model), dtype=torch.float32, device=CPU, flag="model", normalize=True
    ).score(lines)
    assert statistics.mean(normalised) == pytest.approx(0, abs=1e-3)
    assert statistics.stdev(normalised) == pytest.approx(1, abs=1e-3)
    # The critic of PPO begins with its head.
    _, head = load_critic(str(result.model), dtype=torch.float32, device=CPU, flag="critic")
    assert torch.equal(head["weight"], model.score.weight)


def test_a_reward_model_learns_what_is_preferred(
    tiny_model_dir: Path, pairs: Path, held_out: Path, tmp_path: Path
) -> None:
    run = settings(tiny_model_dir, pairs, tmp_path / "run", held_out)
    run.eval.steps, run.ckpt.save_steps = 2, 3
    with capture_logs() as logs:
        result = rollgrad.train_rm(run)
    assert result.steps == STEPS
    rows = logged(result.output_dir)
    trained = [row for row in rows if "train/loss" in row]
    assert trained[-1]["train/loss"] < 0.5 * trained[0]["train/loss"]
    assert {"train/accuracy", "train/reward_gap", "train/score_mean", "train/score_std"} <= trained[0].keys()
    assert {name.removeprefix("eval/") for name in result.after} == set(RMRun().evaluated())
    assert result.after["eval/loss"] < 0.2 < result.before["eval/loss"]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6]
    # Nobody has measured the scores of the model of step 3.
    assert "mean" in json.loads((result.model / "config.json").read_text())
    assert "mean" not in json.loads((result.output_dir / "step_3" / "config.json").read_text())
    assert [log["model"] for log in logs if "no mean and std" in log["event"]] == ["step_3"]
    # A reward model goes on from its own head, and from no one else's mean.
    again = settings(result.model, pairs, tmp_path / "again")
    again.train.max_steps, again.train.num_epochs, again.actor.adam.lr = 1, 1, 0.0
    further = rollgrad.train_rm(again)
    assert torch.equal(weights(further.output_dir)["score.weight"], weights(result.output_dir)["score.weight"])
    assert "mean" not in json.loads((further.model / "config.json").read_text())


@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    tiny_model_dir: Path, pairs: Path, held_out: Path, tmp_path: Path, adapters: bool
) -> None:
    def run_in(name: str) -> RMRun:
        run = settings(tiny_model_dir, pairs, tmp_path / name, held_out)
        run.train.enable_ema = True
        if adapters:
            run.actor.lora, run.actor.adam.lr = LoraConfig(rank=4), 1e-2
        return run

    whole = rollgrad.train_rm(run_in("whole"))
    run = run_in("run")
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_rm(run, sink=Stopping(after=4))
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_rm(run)
    assert result.steps == STEPS
    assert same(result.output_dir, whole.output_dir)
    configs = [json.loads((each.model / "config.json").read_text()) for each in (result, whole)]
    assert configs[0] == configs[1]
    assert result.after["eval/accuracy"] == 1.0
    average = load_file(result.model / "ema" / "model.safetensors")
    assert average.keys() == weights(result.output_dir).keys()
    assert not torch.equal(average["score.weight"], weights(result.output_dir)["score.weight"])
    if adapters:  # one model with the adapters merged: what they learned is in its weights
        changed = [
            name
            for name, weight in weights(result.output_dir).items()
            if name != "score.weight" and not torch.equal(weight, load_file(tiny_model_dir / "model.safetensors")[name])
        ]
        assert changed
        assert all("proj" in name for name in changed)
    # A run that has ended has nothing to measure anew, and loses nothing.
    finished = rollgrad.train_rm(run)
    assert json.loads((finished.model / "config.json").read_text()) == configs[0]
    other = run_in("run")
    other.actor.lora, other.ckpt.resume = LoraConfig(rank=0 if adapters else 2), Resume.ALWAYS
    with pytest.raises(CheckpointError, match="lora"):
        rollgrad.train_rm(other)


def test_margins_and_centring_are_part_of_the_loss(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    rows = [pair(number, margin=4.0 if number % 2 else None) for number in range(PAIRS)]
    margins = written(tmp_path / "margins.jsonl", rows)

    def first_step(data: Path, **rm: Any) -> tuple[float, Path]:
        run = settings(tiny_model_dir, data, tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        run.rm, run.train.max_steps, run.train.batch_size, run.train.num_epochs = (
            PairwiseRewardConfig(**rm),
            1,
            PAIRS,
            1,
        )
        run.actor.adam.lr = 0.0  # what is saved has the scores of the loss
        result = rollgrad.train_rm(run)
        return logged(result.output_dir)[0]["train/loss"], result.model

    plain, model = first_step(pairs)
    judge = RewardModel.load(str(model), dtype=torch.float32, device=CPU, flag="model")
    scores = judge.score(texts(make_tiny_tokenizer(), pairs))

    def mean_loss(centring: float, margin: float) -> float:
        return statistics.mean(
            math.log1p(math.exp(rejected - chosen + margin * (number % 2))) + centring * (chosen + rejected) ** 2
            for number, (chosen, rejected) in enumerate(zip(scores[::2], scores[1::2], strict=True))
        )

    assert plain == pytest.approx(mean_loss(0, 0), abs=1e-5)
    assert first_step(pairs, centring=0.5)[0] == pytest.approx(mean_loss(0.5, 0), abs=1e-5)
    assert first_step(margins, margin=True)[0] == pytest.approx(mean_loss(0, 4), abs=1e-5)
    with capture_logs() as logs:
        unread = first_step(margins)
    assert unread[0] == plain
    assert [log["to_use_them"] for log in logs if "margins" in log["event"]] == ["--rm.margin"]
    with pytest.raises(DataError, match=r"rm.margin is set, but no row of data.dataset"):
        first_step(pairs, margin=True)


def test_gradient_checkpointing_computes_the_same(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    plain, checkpointed = (settings(tiny_model_dir, pairs, tmp_path / name) for name in ("plain", "checkpointed"))
    checkpointed.actor.gradient_checkpointing = True
    checkpointed.train.max_tokens_per_micro_batch = 100  # and any division of a step
    for run in (plain, checkpointed):
        run.train.max_steps, run.train.num_epochs = 2, 1
    one, other = (weights(rollgrad.train_rm(run).output_dir) for run in (plain, checkpointed))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=1e-4)


def test_the_command_line(
    tiny_model_dir: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "rm", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(pairs)]
    output = ["--ckpt.output_dir", str(tmp_path / "run"), "--train.batch_size", "6", "--actor.dtype", "float32"]
    assert main([*words, *output, "--train.max_steps", "1", "--rm.centring", "0.01"]) == 0
    assert str(tmp_path / "run") in capsys.readouterr().out
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert main([*words, "--dry_run", "--ckpt.output_dir", str(tmp_path / "other")]) == 0
    assert "⟦The answer is 0<|im_end|>⟧" in capsys.readouterr().out
    assert main([*words, "--dry_run", "--ckpt.output_dir", str(tmp_path / "other"), "--rm.margin"]) == 2
    assert "rm.margin is set, but no row" in capsys.readouterr().err
    wrong = ["--rm.centring", "-1", "--data.overlong", "cut", "--actor.float32_head", "--actor.aux_loss_coef", "0.1"]
    wrong += ["--actor.router_z_loss_coef", "0.1"]
    assert main([*words, *wrong]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors if line.startswith("error:")] == [
        "rm.centring",
        "data.overlong",
        "actor.float32_head",
        "actor.aux_loss_coef",
        "actor.router_z_loss_coef",
    ]
