"""`rollgrad train sft` and `rollgrad data show` as a user runs them, with a real (tiny) model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.application.learning.examples import together
from rollgrad.application.settings.sections.actor import DType, LoraConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import ExampleDataConfig, ExampleEvalConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.optimizer import LRScheduler
from rollgrad.application.settings.sft import SFTRun, SupervisedAdamConfig, SupervisedModelConfig, SupervisedTrainConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.offline.sft import sft_container
from rollgrad.entrypoints.findings import FINE
from tests.example_runs import logged, weights

ROWS = 20


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {a}?"},
                {"role": "assistant", "content": f"{2 * a}"},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes."},
            ]
        }
        for a in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: Path, data: Path, output: Path, **train: Any) -> SFTRun:
    return SFTRun(
        actor=SupervisedModelConfig(
            model_name_or_path=str(model),
            adam=SupervisedAdamConfig(lr=1e-3),
            lr_scheduler=LRScheduler.CONSTANT,
            lr_warmup_ratio=0.0,
        ),
        data=ExampleDataConfig(dataset=str(data)),
        train=SupervisedTrainConfig(**{"batch_size": 8, **train}),
        ckpt=CheckpointConfig(output_dir=str(output)),
        logger=LoggerConfig(console=False),
    )


def test_a_model_learns_its_conversations(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    run = settings(tiny_model_dir, conversations, tmp_path / "run", num_epochs=4)
    run.eval = ExampleEvalConfig(dataset=str(conversations), steps=5)
    result = rollgrad.train_sft(run)
    assert result.steps == 10  # 4 epochs of 20 rows, 8 in a step
    assert {name.removeprefix("eval/") for name in result.after} == set(SFTRun().evaluated())
    assert result.after["eval/nll"] < 0.7 * result.before["eval/nll"]
    rows = logged(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 5, 10]
    assert result.before["eval/accuracy"] < 0.1  # 320 tokens
    assert result.after["eval/accuracy"] > result.before["eval/accuracy"] + 0.2
    assert 0 < result.after["eval/bits_per_byte"] < 0.7 * result.before["eval/bits_per_byte"]
    trained = [row for row in rows if "train/loss" in row]
    assert trained[-1]["train/loss"] < trained[0]["train/loss"]
    assert trained[-1]["train/epoch"] == pytest.approx(4.0)
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["data.dataset"]["used"] == report["data.dataset"]["rows"] == ROWS
    assert report["eval.dataset"]["also_trained"] == ROWS, "they are the same file"
    assert (
        report["data.dataset"]["trained_tokens"]
        == sum(row["train/trained_tokens"] for row in trained if row["step"] <= 10) / 4
    )
    assert result.report is not None
    assert "train" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_that_was_interrupted_inside_an_epoch_goes_on_exactly(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path, rank: int
) -> None:
    def run(name: str, steps: int, resume: Resume = Resume.NEVER) -> dict[str, torch.Tensor]:
        config = settings(tiny_model_dir, conversations, tmp_path / name, max_steps=steps)
        config.actor.lora = LoraConfig(rank=rank)
        config.ckpt.resume = resume
        rollgrad.train_sft(config)
        return weights(tmp_path / name)

    whole = run("whole", 4)
    run("parts", 1)  # 8 of 20 rows
    parts = run("parts", 4, Resume.ALWAYS)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [row["train/loss"] for row in logged(tmp_path / "whole")] == [
        row["train/loss"] for row in logged(tmp_path / "parts")
    ]


def test_a_stream_goes_on_exactly_where_it_was_interrupted(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path
) -> None:
    """Across the end of the data, with a row that cannot be used."""
    with conversations.open("a") as file:
        file.write("not JSON\n")

    def run(name: str, steps: int, resume: Resume = Resume.NEVER) -> dict[str, torch.Tensor]:
        config = settings(tiny_model_dir, conversations, tmp_path / name, max_steps=steps)
        config.data.stream, config.data.shuffle_buffer = True, 6
        config.ckpt.resume = resume
        rollgrad.train_sft(config)
        return weights(tmp_path / name)

    whole = run("whole", 4)
    run("parts", 2)  # 16 of 21 rows
    parts = run("parts", 4, Resume.ALWAYS)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = [row for row in logged(tmp_path / "whole") if "train/rows" in row]
    assert [row["train/rows"] for row in rows] == [8, 16, 24, 32]
    dropped = [row["train/dropped_rows"] for row in rows]
    assert sum(dropped[:3]) >= 1, "the row that is not JSON comes once in 21"
    assert set(dropped) <= {0, 1}
    first = json.loads((tmp_path / "whole" / "data_report.json").read_text())["data.dataset"]
    assert (first["rows"], first["used"], first["dropped_rows"]) == (ROWS + 1, ROWS, 1)
    assert first["first_rows"]
    config = settings(tiny_model_dir, conversations, tmp_path / "refused", batch_tokens=100)
    config.data.stream, config.data.max_samples, config.data.num_workers = True, 3, 2
    config.data.split = "train[:50%]"
    with pytest.raises(ConfigurationError) as caught:
        rollgrad.train_sft(config)
    flags = ("--train.max_steps", "--train.batch_tokens", "--data.max_samples", "--data.num_workers", "--data.split")
    for flag in flags:
        assert flag in str(caught.value)


def test_other_data_do_not_continue_a_run(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, conversations, tmp_path / "run", max_steps=1)
    rollgrad.train_sft(config)
    config.ckpt.resume = Resume.ALWAYS
    conversations.write_text(conversations.read_text().replace("Yes.", "No."))
    with pytest.raises(CheckpointError, match=r"data\.dataset is .* but holds something else"):
        rollgrad.train_sft(config)


def test_loss_and_accuracy_are_those_of_transformers(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = settings(tiny_model_dir, conversations, tmp_path / "run", max_tokens_per_micro_batch=100)
    run.actor.dtype = DType.FLOAT32
    container = sft_container(run)
    examples = container.examples()
    learner = container.learner()
    parts = learner.parts([examples[index] for index in range(len(examples))])
    measured = together([m for part in parts for m in learner.measure_alike([part])])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    total, count, right = 0.0, 0, 0
    for index in range(len(examples)):
        (branch,) = examples[index].branches
        labels = torch.where(branch.weights_T > 0, branch.token_ids_T, -100)
        with torch.no_grad():
            loss = model(input_ids=branch.token_ids_T[None], labels=labels[None]).loss
            best = model(input_ids=branch.token_ids_T[None]).logits[0].argmax(-1)
        right += int((best[:-1] == branch.token_ids_T[1:])[branch.weights_T[1:] > 0].sum())
        total, count = total + float(loss) * branch.trained_length, count + branch.trained_length
    assert measured["loss"] == pytest.approx(total / count, abs=1e-5)
    assert measured["accuracy"] == pytest.approx(right / count, abs=1e-6)


def test_prompts_are_token_for_token_those_of_rollouts(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    row = {"prompt": "What is 3 plus 4? <|im_end|>", "completion": "7"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    run = settings(tiny_model_dir, path, tmp_path / "run")
    run.data.system_prompt = "Add."
    (branch,) = sft_container(run).examples()[0].branches
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(input_key="prompt", system_prompt="Add."))
    prompt = builder.build(row, "rows").token_ids
    assert tuple(branch.token_ids_T.tolist()[: len(prompt)]) == prompt
    assert branch.weights_T[: len(prompt)].tolist() == [0.0] * len(prompt)
    assert branch.weights_T[len(prompt) :].tolist() == [1.0] * (len(branch) - len(prompt))


def test_a_template_of_the_run_is_saved_with_the_model(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    run = settings(tiny_model_dir, conversations, tmp_path / "run", max_steps=1)
    run.data.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    rollgrad.train_sft(run)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == run.data.chat_template


def test_rows_that_cannot_be_used_stop_the_run_before_the_first_step(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path
) -> None:
    with conversations.open("a") as file:
        file.write('{"messages": [\n{"messages": null}\n')
    run = settings(tiny_model_dir, conversations, tmp_path / "run", max_steps=1)
    with pytest.raises(DataError, match=r"2 of 22 rows .*broken: 1 .*chat.jsonl:21.*empty: 1"):
        rollgrad.train_sft(run)
    assert not (tmp_path / "run" / "model").exists()
    run.data.max_dropped = 0.1
    rollgrad.train_sft(run)
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())["data.dataset"]
    assert (report["used"], report["dropped_rows"]) == (ROWS, 2)
    assert report["dropped"]["broken"]["place"] == f"{conversations}:21"


# The command line


def words(model: Path, data: Path, output: Path) -> list[str]:
    return [
        *("--actor.model_name_or_path", str(model), "--data.dataset", str(data)),
        *("--ckpt.output_dir", str(output)),
    ]


def test_the_command_trains(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train.max_steps", "1", "--train.batch_size", "4", "--eval.dataset", str(conversations)]
    assert main(["train", "sft", *words(tiny_model_dir, conversations, tmp_path / "run"), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip().endswith(str(tmp_path / "run" / "report.html"))
    assert "rows used" in captured.err
    assert "held-out loss" in captured.err


def test_the_command_says_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sft", "--train.batch_size", "0", "--data.output_key", "x"]) == 2
    error = capsys.readouterr().err
    assert "train.batch_size is 0" in error
    assert "No model is set" in error
    assert "No examples are set" in error
    assert "no column with its prompt is named" in error
    assert "Traceback" not in error


def test_data_that_cannot_be_read_are_one_sentence(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "both.jsonl").write_text('{"text": "a", "messages": []}\n')
    for name, sentence in (("none.jsonl", "which does not exist"), ("both.jsonl", "can be read as messages")):
        assert main(["train", "sft", *words(tiny_model_dir, tmp_path / name, tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert "Traceback" not in error


def test_held_out_data_are_looked_at_before_the_model_is_loaded(
    tiny_model_dir: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"question": "1"}\n')
    arguments = ["train", "sft", *words(tiny_model_dir, conversations, tmp_path / "run"), "--eval.dataset"]
    assert main([*arguments, str(conversations), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("20 of 20") == 2
    lines = shown.splitlines()
    assert lines[0] == lines[-1] == FINE
    parts = ("Memory plan", "at once in a machine's memory", "Counts: 20 examples", "row 1", "Data: ", "Settings that")
    assert [*map(shown.index, parts)] == sorted(map(shown.index, parts))
    assert f'eval.dataset: "{conversations}"' in lines
    monkeypatch.setattr("rollgrad.entrypoints.composition.models.load_causal_lm", None)
    idle = tmp_path / "idle.jsonl"
    idle.write_text("".join(json.dumps({"prompt": "1?", "completion": "2", "weight": 0}) + "\n" for _ in range(3)))
    unused = "No row of eval.dataset can be used: no_trained_token: 3"
    for dataset, sentence in (
        (str(wrong), "'"),
        (str(idle), unused),
        ("nowhere.jsonl", "eval.dataset is 'nowhere.jsonl', which does not"),
    ):
        for more in ([], ["--dry_run"]):
            assert main([*arguments, dataset, *more]) == 2
            assert sentence in capsys.readouterr().err
    pairs = ["train", "dpo", "--actor.model_name_or_path", str(tiny_model_dir), "--data.dataset", "pairs.jsonl"]
    assert main([*pairs, "--ref.model_name_or_path", "./nowhere", "--dry_run"]) == 2
    assert "ref.model_name_or_path is './nowhere', which is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["data", "show", "--n", "2"], ["train", "sft", "--dry_run"]])
def test_rows_are_shown_with_their_trained_tokens(
    command: list[str],
    tiny_model_dir: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command[0] == "data":
        assert main([*command, "--print_config", *words(tiny_model_dir, conversations, tmp_path / "run")]) == 0
        printed = capsys.readouterr().out
        assert "model_name_or_path: " in printed
        assert "20 of 20" not in printed
    assert main([*command, *words(tiny_model_dir, conversations, tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦0<|im_end|>⟧" in shown
    assert ("⟦2<|im_end|>⟧" in shown) == (command[0] == "data")  # the second row
    assert "20 of 20" in shown
    assert not (tmp_path / "run").exists()
