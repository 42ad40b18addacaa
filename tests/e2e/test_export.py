"""`rollgrad export`: a run's rollouts are read back by the trainers over examples."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import rollgrad
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.examples.formats import read_row
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.tracking.trajectories import ParquetTrajectories
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.dpo import DPORun, PreferenceModelConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleFormat,
    ExampleTrainConfig,
    PairDataConfig,
)
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedModelConfig, SupervisedTrainConfig
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.entrypoints import export
from rollgrad.entrypoints.cli.main import main
from rollgrad.testing.agent_executor import make_trajectory

GROUPS = 4


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer: object) -> Path:
    """A run's directory with an update of four groups, whose replies are right, wrong, and right in other words; and an
    evaluation."""
    asked = [f"What is {number} plus {number}?" for number in range(GROUPS)]
    return kept_run(tmp_path, TemplateCodec(tiny_tokenizer), asked)


def kept_run(tmp_path: Path, codec: TemplateCodec, asked: Sequence[Any]) -> Path:
    """A run's directory, whose prompts have these contents."""
    groups = []
    for number, content in enumerate(asked):
        messages = ({"role": "user", "content": content},)
        prompt = codec.render([{"role": "user", "content": str(content)}])
        replies = (f"It is {2 * number}.", "I do not know.", f"{2 * number}")
        played = tuple(
            make_trajectory(
                prompt.token_ids,
                codec.encode(f"{reply}<|im_end|>"),
                group_id=number,
                sample_id=3 * number + i,
                rewards=[float("know" not in reply)],
            )
            for i, reply in enumerate(replies)
        )
        given = Prompt(token_ids=prompt.token_ids, text=prompt.text, messages=messages)
        groups.append(RolloutGroup(group_id=number, prompt=given, trajectories=played))
    store = ParquetTrajectories(tmp_path / "run" / "trajectories", codec, max_gib=1.0)
    batch = pack([trajectory for group in groups for trajectory in group.trajectories])
    learned = evolve(batch, advantages_N=torch.ones(batch.token_count), loss_weights_N=torch.ones(batch.token_count))
    for step in (1, 2):  # the second is what the first was
        store.update(step, groups, learned)
    store.evaluation(2, [evolve(groups[0], group_id=99)])
    store.close()
    return tmp_path / "run"


def exported(run: Path, kind: str, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, object]]:
    assert main(["export", kind, str(run), *flags]) == 0
    path = Path(capsys.readouterr().out.strip())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_train_a_model_by_dpo(run: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = exported(run, "pairs", capsys)
    assert len(rows) == GROUPS
    assert rows[1]["chosen"] == [{"role": "assistant", "content": "It is 2."}]
    assert rows[1]["rejected"] == [{"role": "assistant", "content": "I do not know."}]
    result = rollgrad.train_dpo(
        DPORun(
            actor=PreferenceModelConfig(model_name_or_path=str(tiny_model_dir), dtype=DType.FLOAT32),
            data=PairDataConfig(dataset=str(run / "pairs.jsonl")),
            train=ExampleTrainConfig(batch_size=GROUPS, max_steps=1, num_epochs=1),
            logger=LoggerConfig(console=False),
            ckpt=CheckpointConfig(output_dir=str(run / "dpo"), state_minutes=None),
        )
    )
    assert result.steps == 1


@pytest.mark.parametrize(("kind", "count"), [("sft", GROUPS), ("messages", 2 * GROUPS)])
def test_replies_train_a_model_by_imitation(
    run: Path, kind: str, count: int, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = exported(run, kind, capsys, "--min_score", "1", "--output", str(run / "rows.jsonl"))
    assert len(rows) == count
    assert "I do not know" not in json.dumps(rows)
    result = rollgrad.train_sft(
        SFTRun(
            actor=SupervisedModelConfig(model_name_or_path=str(tiny_model_dir), dtype=DType.FLOAT32),
            data=ExampleDataConfig(dataset=str(run / "rows.jsonl")),
            train=SupervisedTrainConfig(batch_size=count, max_steps=1, num_epochs=1),
            logger=LoggerConfig(console=False),
            ckpt=CheckpointConfig(output_dir=str(run / "sft"), state_minutes=None),
        )
    )
    assert result.steps == 1


def test_a_broken_file_is_named_and_the_others_are_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "trajectories" / "step-000001.parquet").write_bytes(b"PAR1")
    assert main(["export", "pairs", str(run)]) == 0
    printed = capsys.readouterr()
    assert "step-000001.parquet cannot be read" in printed.err
    assert f"{GROUPS} rows" in printed.err
    assert "Traceback" not in printed.err


def test_what_is_left_out_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "pairs", str(run)]) == 0
    assert f"left out: {GROUPS} rows that are there already" in capsys.readouterr().err


def test_of_two_exports_to_one_file_the_second_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a killed export left is no reason to refuse."""
    (run / ".pairs.jsonl.new").write_text("half a ro")
    answers: list[int] = []
    read = export.read_trajectories

    def meanwhile(*arguments: Any) -> Any:
        if not answers:
            answers.append(main(["export", "pairs", str(run)]))
        return read(*arguments)

    monkeypatch.setattr(export, "read_trajectories", meanwhile)
    assert len(exported(run, "pairs", capsys)) == GROUPS
    assert answers == [2]
    assert {path.name for path in run.iterdir()} == {"pairs.jsonl", "trajectories"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (lambda run: ["export", "pairs", str(run), "--output", str(run / "there")], "which is there already"),
        (lambda run: ["export", "pairs", str(run / "none")], "has no trajectories"),
        (lambda run: ["export", "pairs", str(run), "--min_score", "7"], "8 groups without a score of 7"),
        (lambda run: ["export", "pairs", str(run), "--output", str(run / "no" / "x.jsonl")], "cannot be written"),
        (lambda run: ["export", "pears", str(run)], "rollgrad export pairs|sft|messages"),
        (lambda run: ["export", "pairs"], "rollgrad export pairs|sft|messages"),
        (lambda run: ["export", "pairs", str(run), "--min_scores", "1"], "--min_score"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    run: Path, words: Callable[[Path], list[str]], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "there").write_text("mine")
    assert main(words(run)) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert {path.name for path in run.iterdir()} == {"there", "trajectories"}
    assert (run / "there").read_text() == "mine"


@pytest.mark.parametrize("kind", ["pairs", "sft", "messages"])
def test_rows_have_the_images_of_prompts_that_are_files(
    tmp_path: Path, tiny_tokenizer: object, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = {"type": "text", "text": "?"}
    pictured = [[{"type": "image", "image": source}, asks] for source in ("red.png", b"file")]
    run = kept_run(tmp_path, TemplateCodec(tiny_tokenizer), [*pictured, "And 2?"])
    (run / "config.yaml").write_text("data: {image_key: pictures}\n")
    assert main(["export", kind, str(run)]) == 0
    assert "replies to images that are no files" in capsys.readouterr().err
    rows = [json.loads(line) for line in (run / f"{kind}.jsonl").read_text().splitlines()]
    assert {tuple(row["images"]) for row in rows} == {("red.png",), ()}
    form = {"pairs": ExampleFormat.PAIRS, "sft": ExampleFormat.COMPLETION, "messages": ExampleFormat.MESSAGES}[kind]
    sample: Any
    sample, _ = read_row(rows[0], form, ReadingSettings(image_key="images"))  # as a trainer reads it
    conversation = sample.chosen if kind == "pairs" else sample
    assert conversation.messages[0]["content"] == [{"type": "image", "image": "red.png"}, asks]
