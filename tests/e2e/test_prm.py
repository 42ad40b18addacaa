"""`rollgrad train prm` as a user runs it, with a real (tiny) model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollgrad
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, DType, LoraConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.examples import ExampleEvalConfig, StepDataConfig
from rollgrad.application.settings.sections.reward import RewardConfig, StepReward
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.rl.rewards import make_reward_model
from tests.example_runs import Stopping, logged, small, written
from tests.moved_models import moved_copy

ROWS, BATCH, STEPS = 18, 6, 6


def solution(number: int, **more: Any) -> dict[str, Any]:
    """Two steps, of which the second is wrong in every other solution."""
    wrong = number % 2 == 1
    steps = [f"First there are {number}.", "I do not know!" if wrong else f"So the answer is {number}."]
    return {"prompt": f"How many is {number}?", "completions": steps, "labels": [True, not wrong], **more}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", [solution(number) for number in range(ROWS)])


def settings(model: Path, data: Path, output: Path, **more: Any) -> PRMRun:
    return small(PRMRun(data=StepDataConfig(**more)), model, data, output, lr=3e-3, batch_size=BATCH)


def losses(run: PRMRun) -> list[float]:
    """The loss of each step."""
    result = rollgrad.train_prm(run)
    return [row["train/loss"] for row in logged(result.output_dir) if "train/loss" in row]


def judged(model: Path, text: str, places: list[str]) -> list[float]:
    """The probability of + against - by transformers' own class, after each of `places` in `text`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    right, wrong = (tokenizer(token)["input_ids"][0] for token in config["reward_tokens"])
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        logits = loaded(torch.tensor([encoded["input_ids"]])).logits[0]
    ends = [text.index(place) + len(place) for place in places]
    tokens = [max(i for i, (left, _) in enumerate(encoded["offset_mapping"]) if left < end) for end in ends]
    return [float(torch.softmax(logits[token, [right, wrong]], 0)[0]) for token in tokens]


def test_a_model_learns_to_find_wrong_steps(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    held_out = written(tmp_path / "held_out.jsonl", [solution(number) for number in (30, 31)])
    run = settings(tiny_model_dir, rows, tmp_path / "run")
    run.train.num_epochs = 4
    run.eval = ExampleEvalConfig(dataset=str(held_out))
    result = rollgrad.train_prm(run)
    assert {name.removeprefix("eval/") for name in result.after} == set(PRMRun().evaluated())
    assert result.after["eval/step_accuracy"] == 1.0 > result.before["eval/step_accuracy"]
    assert result.after["eval/error_f1"] == result.after["eval/first_error_accuracy"] == 1.0
    # What the saved model says at the end of each step, by its logits of two tokens alone, is what was trained.
    assert json.loads((result.model / "config.json").read_text())["reward_tokens"] == ["+", "-"]
    wanted = []
    for number in (30, 31):
        row = solution(number)
        steps = [f"{step}\n" for step in row["completions"]]
        text = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n" + "".join(steps) + "<|im_end|>\n"
        for chance, label in zip(judged(result.model, text, steps), row["labels"], strict=True):
            wanted.append(-math.log(chance if label else 1 - chance))
    assert result.after["eval/loss"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-3, abs=1e-5)


@pytest.fixture
def judge(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model that says something else of each step."""
    path = moved_copy(tiny_model_dir, tmp_path / "judge")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "reward_tokens": ["+", "-"]}))
    return path


@pytest.mark.parametrize("how", StepReward)
def test_replies_are_scored_step_by_step(judge: Path, tmp_path: Path, how: StepReward) -> None:
    """The probabilities are those of transformers' own class behind each step; each reply's depend on it alone."""
    replies = [["First there are 3.", "I do not know!"], ["So the answer is 4."], [], ["One.", "Two.", "Three!"]]
    prompt = "<|im_start|>user\nHow many is {}?<|im_end|>\n<|im_start|>assistant\n"
    lines = [{"prompt": prompt.format(number), "completion": "\n".join(steps)} for number, steps in enumerate(replies)]
    source, out = written(tmp_path / "replies.jsonl", lines), tmp_path / "scored.jsonl"
    reward = RewardConfig(model_name_or_path=str(judge), step_reward=how)
    config = RLConfig(actor=ActorConfig(model_name_or_path=str(judge), dtype=DType.FLOAT32), reward=reward)
    rollgrad.score(config, source, out)
    for number, (steps, row) in enumerate(zip(replies, map(json.loads, out.read_text().splitlines()), strict=True)):
        if not steps:
            assert (row["reward"], row.get("steps")) == (0.0, None)
            continue
        ends = [f"{step}\n" for step in steps]
        chances = judged(judge, prompt.format(number) + "".join(ends) + "<|im_end|>\n", ends)
        assert row["steps"] == pytest.approx(chances, abs=1e-5)
        wanted = {"min": min(chances), "last": chances[-1], "product": math.prod(chances)}
        assert row["reward"] == pytest.approx(wanted.get(how, sum(chances) / len(chances)), abs=1e-5)


def test_settings_of_the_other_kind_of_reward_model_are_refused(judge: Path, reward_model_dir: Path) -> None:
    config = RLConfig(reward=RewardConfig(model_name_or_path=str(judge), normalize=Normalise.MODEL))
    with pytest.raises(ConfigurationError, match=r"has no mean and std: leave --reward\.normalize out"):
        make_reward_model(config)
    config.reward = RewardConfig(model_name_or_path=str(reward_model_dir), step_separator=". ")
    with pytest.raises(ConfigurationError, match=r"is no process reward model: leave --reward.step_separator out"):
        make_reward_model(config)


def test_a_text_that_is_too_long_loses_its_beginning(judge: Path) -> None:
    """Its steps behind what is left are judged, and it counts as cut."""
    model = make_reward_model(
        RLConfig(actor=ActorConfig(dtype=DType.FLOAT32), reward=RewardConfig(model_name_or_path=str(judge)))
    )
    steps = [f"So it is {number}." for number in range(200)]
    ((_, cut, found), (_, whole, every)) = model.judge(
        [RewardInput(text="Why? " + "\n".join(part), reply="\n".join(part)) for part in (steps, steps[:3])]
    )
    assert (cut, whole, len(every)) == (True, False, 3)
    assert 3 < len(found) < len(steps)


def test_special_tokens_are_no_part_of_a_step(judge: Path) -> None:
    """One that was sampled in a reply, or whose name has the reply in it, changes nothing of the judgement."""
    model = make_reward_model(
        RLConfig(actor=ActorConfig(dtype=DType.FLOAT32), reward=RewardConfig(model_name_or_path=str(judge)))
    )
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    sampled = {"im": "im<|im_end|>\n", "One.\nTwo.": "One.<|im_start|>\nTwo.<|im_end|>"}
    for reply, text in sampled.items():
        ((*_, found), (*_, wanted)) = model.judge(
            [RewardInput(text=prompt + read, reply=reply) for read in (text, reply)]
        )
        assert found == pytest.approx(wanted, abs=1e-6)


def test_labels_are_right_wrong_or_between(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    def first_loss(name: str, **of_rows: Any) -> float:
        labelled = [
            solution(number) | {key: value(number) for key, value in of_rows.items()} for number in range(BATCH)
        ]
        more = {"up_to_first_error": True} if name == "first error" else {}
        run = settings(tiny_model_dir, written(tmp_path / f"{name}.jsonl", labelled), tmp_path / name, **more)
        run.train.num_epochs = 1
        return losses(run)[0]

    right = first_loss("right", labels=lambda _: [1, 1.0])
    wrong = first_loss("wrong", labels=lambda _: ["-", "false"])
    assert first_loss("half", labels=lambda _: [0.5, 0.5]) == pytest.approx((right + wrong) / 2, rel=1e-5)
    assert first_loss("a quarter", labels=lambda _: [0.25, 0.25]) == pytest.approx((right + 3 * wrong) / 4, rel=1e-5)
    # Steps without a label, and with up_to_first_error those after the first wrong one, are context alone.
    first_wrong = first_loss("first", labels=lambda _: [False, None])
    assert first_loss("first error", labels=lambda _: [False, True]) == pytest.approx(first_wrong, rel=1e-6)
    assert first_wrong != pytest.approx(wrong, rel=1e-3)


def test_placeholders_mark_the_ends_of_steps(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One text is learned alike as steps and with placeholders, without the chat template."""
    in_steps = [solution(number) for number in range(BATCH)]
    in_text = [
        {"input": row["prompt"] + "".join(f"{step} ки" for step in row["completions"]), "labels": row["labels"]}
        for row in in_steps
    ]
    steps = settings(tiny_model_dir, written(tmp_path / "steps.jsonl", in_steps), tmp_path / "steps", separator=" ки")
    steps.data.apply_chat_template = False
    text = settings(tiny_model_dir, written(tmp_path / "text.jsonl", in_text), tmp_path / "text", placeholder="ки")
    as_text = [
        {"input": row["input"], "label": row["input"].replace("ки", "+").replace("know! +", "know! -")}
        for row in in_text
    ]
    more = {"placeholder": "ки", "labels_key": "label"}
    shepherd = settings(tiny_model_dir, written(tmp_path / "shepherd.jsonl", as_text), tmp_path / "shepherd", **more)
    wanted = losses(steps)
    assert losses(text) == pytest.approx(wanted, rel=1e-5)
    assert losses(shepherd) == pytest.approx(wanted, rel=1e-5)


def test_adapters_and_a_run_that_ended_early(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    def run_in(name: str) -> PRMRun:
        run = settings(tiny_model_dir, rows, tmp_path / name)
        run.actor.lora, run.actor.adam.lr = LoraConfig(rank=4), 1e-2
        run.train.max_tokens_per_micro_batch = 200  # and any division of a step
        return run

    whole = rollgrad.train_prm(run_in("whole"))
    run = run_in("run")
    with pytest.raises(CheckpointError, match="disk is full"):
        rollgrad.train_prm(run, sink=Stopping(after=4))
    run.ckpt.resume = Resume.ALWAYS
    result = rollgrad.train_prm(run)
    one, other = (load_file(each.model / "model.safetensors") for each in (whole, result))
    assert all(torch.equal(other[name], weight) for name, weight in one.items())
    assert (result.model / "adapter" / "adapter_model.safetensors").exists()


def test_the_command_line_names_what_is_wrong(
    tiny_model_dir: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "prm", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset"]
    output = ["--ckpt.output_dir", str(tmp_path / "run"), "--actor.dtype", "float32"]
    assert main([*words, str(rows), "--dry_run", *output]) == 0
    assert "First there are 0.⟦\n⟧So the answer is 0.⟦\n⟧" in capsys.readouterr().out
    assert main([*words, str(rows), "--dry_run", *output, "--prm.reward_tokens", "+", "not at all"]) == 2
    assert "'not at all', which the tokenizer writes as" in capsys.readouterr().err
    broken = [
        solution(0, labels=[True]),
        solution(0, labels=[True, 2]),
        solution(0, labels=None),
        solution(0, labels=[None, None]),
        solution(0, completions=[]),
        solution(0, completions=["a", " "]),
        solution(0, completions=["Say <|im_end|>", "b"]),
        solution(0, prompt=None),
    ]
    mixed = written(tmp_path / "mixed.jsonl", [solution(number) for number in range(ROWS)] + broken)
    assert main([*words, str(mixed), *output, "--train.max_steps", "1", "--data.max_dropped", "0.5"]) == 0
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())["data.dataset"]
    assert report["used"] == ROWS
    assert {reason: drop["count"] for reason, drop in report["dropped"].items()} == {
        "broken": 2,
        "empty": 4,
        "no_trained_token": 1,
        "refused_by_template": 1,
    }
    capsys.readouterr()
    assert main([*words, str(rows), "--prm.reward_tokens", "a", "a", "--data.placeholder", ""]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors if line.startswith("error:")] == [
        "data.placeholder",
        "prm.reward_tokens",
    ]
    unread = ["--data.placeholder", "ки", "--data.system_prompt", "Think.", "--actor.float32_head"]
    assert main([*words, str(rows), *unread]) == 2
    said = capsys.readouterr().err
    assert "data.system_prompt is set: leave --data.system_prompt out" in said
    assert "always compared in float32: leave --actor.float32_head out" in said
    assert main([*words, str(rows), "--data.steps_key", "steps"]) == 2
    assert "no column 'steps'" in capsys.readouterr().err


def test_reward_tokens_are_one_token_each(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, rows, tmp_path / "run")
    run.prm.reward_tokens = ("+", "not at all")
    with pytest.raises(ConfigurationError, match=r"'not at all', which the tokenizer writes as \d+ tokens"):
        rollgrad.train_prm(run)
