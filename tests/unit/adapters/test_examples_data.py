"""Rows of datasets become tokens and weights, or are counted by the reason why not."""

import gzip
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples import preparation
from rollgrad.adapters.data.examples.formats import read_row
from rollgrad.adapters.data.examples.preparation import cache_key, prepare_examples
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings, find_format
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.adapters.data.examples.rows import Conversation, Pair, PlainText, Pretokenised
from rollgrad.adapters.data.examples.sources import LOOKED_AT, JsonLines, Mixture, open_sources
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows, TrainOn
from rollgrad.domain.errors import ConfigurationError, DataError
from tests.forked_spawns import forked_by
from tests.scripts import ScriptHost

CHAT = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "seven"}]
READING = ReadingSettings()

ROWS: Mapping[ExampleFormat, Mapping[str, Any]] = {
    ExampleFormat.TOKENS: {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ExampleFormat.MESSAGES: {"messages": CHAT},
    ExampleFormat.SHAREGPT: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ExampleFormat.COMPLETION: {"prompt": "What is 3 plus 4?", "completion": "seven"},
    ExampleFormat.ALPACA: {"instruction": "Add.", "input": "3 4", "output": "seven"},
    ExampleFormat.TEXT: {"text": "The quick brown fox"},
}
PAIR = {"prompt": "What is 3 plus 4?", "chosen": "seven", "rejected": "eight"}
"""A row that its columns do not tell from others: who learns from pairs says so."""


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
    return path


def opened(path: Path | str, reading: ReadingSettings = READING, **more: Any) -> Mixture:
    values: dict[str, Any] = {"split": "train", "probs": None, "seed": 0, "max_samples": None, **more}
    return open_sources(str(path), settings=reading, **values)


def prepared(
    mixture: Mixture, tokenizer: Any, cache: Path | None = None, workers: int = 1, **more: Any
) -> PreparedExamples:
    return prepare_examples(
        mixture, tokenizer, PreparationSettings(**more), cache_dir=cache, num_workers=workers, setting="data.dataset"
    )


# Files


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_slice_of_a_split_is_those_rows_and_other_data(kind: str, tmp_path: Path) -> None:
    """One slice is not taken for what was prepared of another."""
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, *({"text": str(number)} for number in range(10)))
    else:
        path.write_text("text\n" + "".join(f"{number}\n" for number in range(10)))
    parts = {split: opened(path, split=split) for split in ("train", "train[:80%]", "train[80%:]", "train[-3:-1]")}
    texts = {split: [part.parts[0].rows[row]["text"] for row in range(len(part))] for split, part in parts.items()}
    assert [*map(int, texts["train[:80%]"] + texts["train[80%:]"])] == [*range(10)]
    assert [*map(int, texts["train[-3:-1]"])] == [7, 8]
    assert len({part.fingerprint for part in parts.values()}) == len(parts)
    if kind == "jsonl":
        assert parts["train[80%:]"].parts[0].place(0) == f"{path}:9"
    with pytest.raises(DataError, match=r"slice \[10:\] of a split has none of the 10 rows of .*: change --data.split"):
        opened(path, split="train[10:]")


def test_a_pattern_of_compressed_lines_is_read_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "third"}\n\n{"text": 4}'))
    write(tmp_path / "a.jsonl", {"text": "first"}, b"broken", {"text": "second"})
    mixture = opened(tmp_path / "*.jsonl*")
    (source,) = mixture.parts
    assert [source.place(row) for row in range(5)] == [
        *(f"{tmp_path}/a.jsonl:{line}" for line in (1, 2, 3)),
        *(f"{tmp_path}/b.jsonl.gz:{line}" for line in (1, 3)),
    ]
    assert [source.rows[row]["text"] for row in (4, 3, 2, 0)] == [4, "third", "second", "first"]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "third"}\n\n{"text": 5}'))
    assert opened(tmp_path / "*.jsonl*").fingerprint != mixture.fingerprint


def test_the_fingerprint_of_a_pattern_is_that_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nfirst\n")
    (tmp_path / "b.csv").write_text("text\nsecond\n")
    before = opened(tmp_path / "*.csv").fingerprint
    assert opened(tmp_path / "[ab].csv").fingerprint == before
    (tmp_path / "b.csv").write_text("text\nother\n")
    assert opened(tmp_path / "*.csv").fingerprint != before


def test_compressed_lines_that_were_cut_off_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:-9])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz cannot be read \(Truncated compressed stream\): check it"):
        opened(tmp_path / "cut.jsonl.gz")


# Formats


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_are_of_the_datasource_that_they_name(tmp_path: Path, ending: str) -> None:
    """By either name of the column; those that name none are of their file's."""
    import datasets

    rows: list[dict[str, Any]] = [{"text": "a", "data_source": "math"}, {"text": "b", "data_source": None}]
    written = write(tmp_path / "rows.jsonl", *rows)
    if ending == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    named = write(tmp_path / "named.jsonl", {"text": "c", "datasource": "code", "data_source": "math"})
    assert opened(f"{written.with_suffix(f'.{ending}')},{named}").datasources(["rows", "named"]) == [
        "math",
        "rows",
        "code",
    ]


@pytest.mark.parametrize("kind", [ExampleFormat.MESSAGES, ExampleFormat.SHAREGPT])
def test_messages_may_be_json_text(kind: ExampleFormat, tiny_tokenizer: Any) -> None:
    row = ROWS[kind]
    text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    assert text != row
    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    assert preparer.prepare(text, kind) == preparer.prepare(row, kind)


@pytest.mark.parametrize("kind", ROWS)
def test_each_format_is_known_by_its_columns_and_becomes_tokens(kind: ExampleFormat, tiny_tokenizer: Any) -> None:
    row = ROWS[kind]
    assert find_format([*row, "datasource", "id"], "set", READING) is kind
    made = Preparer(tiny_tokenizer, PreparationSettings()).prepare(row, kind)
    assert made.weight == 1.0
    (branch,) = made.branches
    assert branch.trained > 0
    assert branch.weights[0] == 0.0


def sampled(tokenizer: Any, text: str, **more: Any) -> dict[str, Any]:
    """A row as `rollgrad generate` writes it."""
    tokens = tokenizer.encode(text)
    row = {"prompt": "<user>7 + 3?", "messages": CHAT[:1], "completion": tokenizer.decode(tokens), "label": "10"}
    return {**row, "prompt_tokens": [1, 5, 6], "tokens": tokens, "stop_reason": "length", **more}


def test_sampled_replies_are_trained_as_they_were_sampled_also_beside_data_whose_columns_are_named(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """No template writes them again, one that was cut off does not end, and one that failed is counted."""
    good = sampled(tiny_tokenizer, "the sum is")
    failed = {**good, "completion": None, "tokens": [], "failure": "The engine is gone."}
    replies, named = tmp_path / "replies.jsonl", write(tmp_path / "named.jsonl", {"question": "a", "answer": "b"})
    write(replies, good, failed, sampled(tiny_tokenizer, "the sum is", completion="something else"))
    reading = ReadingSettings(input_key="question", output_key="answer")
    mixture = opened(f"{named},{replies}", reading)
    assert [part.kind for part in mixture.parts] == [ExampleFormat.COMPLETION, ExampleFormat.REPLIES]
    found = prepared(opened(replies), tiny_tokenizer)
    (branch,) = found[0].branches
    assert branch.token_ids_T.tolist() == [*good["prompt_tokens"], *good["tokens"]]
    assert branch.trained_length == len(good["tokens"])
    assert {reason: drop.count for reason, drop in found.report.dropped.items()} == {Reason.EMPTY: 1, Reason.BROKEN: 1}
    assert "The engine is gone." in found.report.dropped[Reason.EMPTY].example
    assert "a model with another tokenizer sampled it" in found.report.dropped[Reason.BROKEN].example
    whole = PreparationSettings(reading=evolve(READING, train_on=TrainOn.ALL))
    (branch,) = Preparer(tiny_tokenizer, whole).prepare(good, ExampleFormat.REPLIES).branches
    assert branch.weights == (0.0, *(1.0,) * (len(branch.token_ids) - 1))
    texts = ReadingSettings(input_key="messages", output_key="completion")  # whose own columns are there
    assert find_format(list(good), "set", texts) is ExampleFormat.COMPLETION


SAID: Mapping[ExampleFormat, Mapping[str, Any]] = {
    **{kind: row for kind, row in ROWS.items() if kind not in (ExampleFormat.TOKENS, ExampleFormat.TEXT)},
    ExampleFormat.PAIRS: PAIR,
    ExampleFormat.UNPAIRED: {"prompt": "What is 3 plus 4?", "completion": "seven", "label": True},
}
"""Rows of conversations."""


@pytest.mark.parametrize("kind", SAID)
def test_a_column_has_the_system_message_of_a_conversation_without_one(
    kind: ExampleFormat, tiny_tokenizer: Any
) -> None:
    """In every format; that of the settings is for rows that have none."""

    def written(row: Mapping[str, Any], **reading: Any) -> list[str]:
        settings = PreparationSettings(reading=evolve(READING, **reading))
        branches = Preparer(tiny_tokenizer, settings).prepare(row, kind).branches
        return [tiny_tokenizer.decode(branch.token_ids) for branch in branches]

    row = SAID[kind]
    told = written({**row, "system": "Be brief."}, system_prompt="Be long.")
    assert told == written(row, system_prompt="Be brief.")
    assert all(text.startswith("<|im_start|>system\nBe brief.<|im_end|>") for text in told)
    assert written({**row, "system": ""}) == written(row)
    if kind in (ExampleFormat.COMPLETION, ExampleFormat.ALPACA, ExampleFormat.PAIRS, ExampleFormat.UNPAIRED):
        with pytest.raises(RowError, match="need the chat template"):
            written({**row, "system": "Be brief."}, apply_chat_template=False)


def test_columns_that_nothing_is_read_from_are_told(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A row that cannot be read does not tell; columns that are nested, or that all formats have, are read."""
    rows = [
        {"messages": [], "id": 0, "empty": None},
        {"messages": CHAT, "system_prompt": "Be brief.", "tools": [], "weight": 1, "datasource": "a", "id": 1},
    ]
    report = prepared(opened(write(tmp_path / "a.jsonl", *rows)), tiny_tokenizer).report
    assert report.unread == ["id", "system_prompt"]
    assert ("columns not read", "id, system_prompt") in report.lines()
    assert DataReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    nested = evolve(READING, input_key="asked.text", output_key="said")
    row = {"asked": {"text": "a"}, "said": "b", "images": []}
    (source,) = opened(write(tmp_path / "b.jsonl", row), evolve(nested, image_key="images")).parts
    assert source.unread == ()
    assert opened(write(tmp_path / "c.jsonl", rows[0])).parts[0].unread == ()
    pairs = evolve(READING, format=ExampleFormat.PAIRS)
    labelled = [{"prompt": "a", "completion": text, "label": text == "b", "id": 1} for text in ("b", "c")]
    assert opened(write(tmp_path / "d.jsonl", *labelled), pairs).parts[0].unread == ("id",)
    assert opened(write(tmp_path / "e.jsonl", {**PAIR, "score_chosen": 1}), pairs).parts[0].unread == ("score_chosen",)


def test_whole_numbers_are_texts_where_texts_are_asked_for(tmp_path: Path) -> None:
    """As the answers to sums are in CSV; of 2.0 and True it is not known whether they were written as 2 and true."""
    (tmp_path / "sums.csv").write_text("question,answer\n3+4?,7\n")
    (source,) = opened(tmp_path / "sums.csv", named := evolve(READING, input_key="question", output_key="answer")).parts
    sample, _ = read_row(source.rows[0], ExampleFormat.COMPLETION, named)
    assert isinstance(sample, Conversation)
    assert sample.messages[-1]["content"] == "7"
    pair, _ = read_row({"prompt": 5, "chosen": 7, "rejected": 8}, ExampleFormat.PAIRS, READING)
    assert isinstance(pair, Pair)
    alpaca, _ = read_row({"instruction": 5, "output": 7}, ExampleFormat.ALPACA, READING)
    assert isinstance(alpaca, Conversation)
    assert alpaca.messages == pair.chosen.messages  # type: ignore[union-attr]
    for value in (2.0, True):
        with pytest.raises(RowError, match=f"completion holds {value}"):
            read_row({"prompt": "a", "completion": value}, ExampleFormat.COMPLETION, READING)


def test_texts_without_a_prompt_take_no_system_message() -> None:
    texts = {"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c", "system": "Be brief."}
    with pytest.raises(RowError, match=r"leave out --data\.system_prompt and the column system"):
        read_row(texts, ExampleFormat.PAIRS, READING)


def test_several_readings_are_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match=r"messages \(messages\) or as text \(text\): set --data.format"):
        find_format(["messages", "text"], "set", READING)
    assert find_format(["messages", "text"], "set", evolve(READING, format=ExampleFormat.TEXT)) is ExampleFormat.TEXT
    with pytest.raises(DataError, match=r"'set' has no column 'messages', which --data.format messages needs"):
        find_format(["text"], "set", evolve(READING, format=ExampleFormat.MESSAGES))


def test_data_of_other_trainers_and_unknown_columns_are_named() -> None:
    with pytest.raises(DataError, match="preference pairs"):
        find_format(["prompt", "chosen", "rejected"], "set", READING)
    with pytest.raises(DataError, match="question, response, of which no format can be told"):
        find_format(["question", "response"], "set", READING)
    keyed = evolve(READING, input_key="question", output_key="response")
    assert find_format(["question", "response"], "set", keyed) is ExampleFormat.COMPLETION
    sample, _ = read_row({"question": "q", "response": "r"}, ExampleFormat.COMPLETION, keyed)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q", "r"]


def test_labelled_completions_are_imitated_only_when_that_is_said() -> None:
    columns = ["prompt", "completion", "label"]
    for labels in ([True, False], [1, 0, 1], ["true", "False"], [1.0]):
        with pytest.raises(DataError, match=r"as prompt_completion .* or as good and bad completions .* --data.format"):
            find_format(columns, "set", READING, labels)
        said = evolve(READING, format=ExampleFormat.COMPLETION)
        assert find_format(columns, "set", said, labels) is ExampleFormat.COMPLETION
    for labels in ([], ["sports", "true"], [0, 2]):
        assert find_format(columns, "set", READING, labels) is ExampleFormat.COMPLETION


def test_labels_that_say_good_and_bad_are_not_imitated_unasked(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (None, True, False)]
    with pytest.raises(DataError, match="good and bad completions"):
        opened(write(tmp_path / "a.jsonl", *rows))


def test_a_named_prompt_has_its_completion() -> None:
    keyed = evolve(READING, input_key="question")
    assert find_format(["question", "completion"], "set", keyed) is ExampleFormat.COMPLETION
    sample, _ = read_row({"question": "q", "completion": "r"}, ExampleFormat.COMPLETION, keyed)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q", "r"]
    assert find_format(["question", "response"], "set", keyed) is ExampleFormat.MESSAGES
    with pytest.raises(RowError, match=r"question holds a text, not messages: .*--data.output_key.*--data.format text"):
        read_row({"question": "q", "response": "r"}, ExampleFormat.MESSAGES, keyed)
    sample, _ = read_row({"question": "q"}, ExampleFormat.TEXT, evolve(keyed, format=ExampleFormat.TEXT))
    assert sample == PlainText(prompt="", completion="q", whole=True)


def test_texts_become_messages_as_in_rollouts_or_stay_plain() -> None:
    row = ROWS[ExampleFormat.COMPLETION]
    sample, _ = read_row(row, ExampleFormat.COMPLETION, evolve(READING, system_prompt="Be brief."))
    assert isinstance(sample, Conversation)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant"]
    assert sample.weights == (0.0, 0.0, 1.0)
    plain = evolve(READING, apply_chat_template=False, input_template="Q: {} A:")
    sample, _ = read_row(row, ExampleFormat.COMPLETION, plain)
    assert sample == PlainText(prompt="Q: What is 3 plus 4? A:", completion="seven")


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (TrainOn.ASSISTANT, (0.0, 1.0, 0.0, 1.0, 1.0)),
        (TrainOn.LAST, (0.0, 0.0, 0.0, 0.0, 1.0)),
        (TrainOn.COMPLETION, (0.0, 0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_train_on_says_which_replies_are_trained(train_on: TrainOn, expected: tuple[float, ...]) -> None:
    messages = [*CHAT, *CHAT, {"role": "assistant", "content": "more"}]
    sample, _ = read_row({"messages": messages}, ExampleFormat.MESSAGES, evolve(READING, train_on=train_on))
    assert isinstance(sample, Conversation)
    assert sample.weights == expected


def test_weights_of_messages_win_over_train_on() -> None:
    messages = [*CHAT, CHAT[0], {**CHAT[1], "train": False}, CHAT[0], {**CHAT[1], "weight": 0.5}]
    sample, weight = read_row({"messages": messages, "weight": 2}, ExampleFormat.MESSAGES, READING)
    assert isinstance(sample, Conversation)
    assert sample.weights == (0.0, 1.0, 0.0, 0.0, 0.0, 0.5)
    assert weight == 2.0
    assert all(not {"train", "weight"} & message.keys() for message in sample.messages)


def test_what_arrow_fills_in_is_left_out_but_not_in_arguments_of_calls() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
    sample, _ = read_row({"messages": messages, "tools": tools}, ExampleFormat.MESSAGES, READING)
    assert isinstance(sample, Conversation)
    assert sample.messages[0] == {"role": "user", "content": "q"}
    assert sample.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": None}}
    assert sample.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_arguments_as_text_and_as_object_are_the_same_and_no_tools_are_none(tiny_tokenizer: Any) -> None:
    def row(arguments: Any, tools: Any) -> dict[str, Any]:
        call = {"name": "f", "arguments": arguments}
        return {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}], "tools": tools}

    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    tool = {"name": "f", "parameters": {}}
    first = preparer.prepare(row({"a": 1}, [tool]), ExampleFormat.MESSAGES)
    assert preparer.prepare(row('{"a": 1}', json.dumps([tool])), ExampleFormat.MESSAGES) == first
    none = preparer.prepare(row({"a": 1}, None), ExampleFormat.MESSAGES)
    assert preparer.prepare(row({"a": 1}, []), ExampleFormat.MESSAGES) == none != first


def test_sharegpt_calls_and_alpaca_history() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "seven"},
    ]
    sample, _ = read_row({"conversations": turns, "system": "s"}, ExampleFormat.SHAREGPT, READING)
    assert isinstance(sample, Conversation)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    row = {"instruction": "i", "input": "n", "output": "o", "history": [["q1", "a1"]]}
    sample, _ = read_row(row, ExampleFormat.ALPACA, READING)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q1", "a1", "i\nn", "o"]
    assert sample.weights == (0.0, 0.0, 0.0, 1.0)


def test_pretokenised_rows_are_trained_as_given() -> None:
    for row, expected in (
        ({"input_ids": [5, 6, 7]}, (1.0, 1.0, 1.0)),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, (0.0, 0.0, 1.0)),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0.5, 1]}, (0.0, 0.5, 1.0)),
        ({"input_ids": [5, 6, 7], "assistant_masks": [False, True, True]}, (0.0, 1.0, 1.0)),
    ):
        sample, _ = read_row(row, ExampleFormat.TOKENS, READING)
        assert sample == Pretokenised(token_ids=(5, 6, 7), weights=expected)


def test_padding_is_left_out() -> None:
    for mask in ([0, 1, 1, 0], [False, True, True, False]):
        for more, expected in (({}, (1.0, 1.0)), ({"labels": [-100, -100, 6, -100]}, (0.0, 1.0))):
            row = {"input_ids": [9, 5, 6, 9], "attention_mask": mask, **more}
            sample, _ = read_row(row, ExampleFormat.TOKENS, READING)
            assert sample == Pretokenised(token_ids=(5, 6), weights=expected)


def test_parts_of_text_are_the_text(tiny_tokenizer: Any) -> None:
    def row(*parts: Any) -> dict[str, Any]:
        return {"messages": [CHAT[0], {"role": "assistant", "content": [*parts]}]}

    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    parts = ({"type": "text", "text": "sev", "image": None}, {"text": "e"}, "n")
    assert preparer.prepare(row(*parts), ExampleFormat.MESSAGES) == preparer.prepare(
        {"messages": CHAT}, ExampleFormat.MESSAGES
    )
    for part, said in (
        ({"type": "image", "url": "a.png"}, "text alone"),
        ({"type": "text", "text": "a", "train": False}, "own train or weight"),
        (7, "text alone"),
    ):
        with pytest.raises(RowError, match=said) as caught:
            preparer.prepare(row(part), ExampleFormat.MESSAGES)
        assert caught.value.reason is Reason.BROKEN


@pytest.mark.parametrize("change", [{"train": False}, {"weight": 0.5}, {"weight": 0}])
def test_training_all_leaves_no_message_out(change: Mapping[str, Any]) -> None:
    reading = evolve(READING, train_on=TrainOn.ALL)
    with pytest.raises(RowError, match=r"--data\.train_on all trains everything") as caught:
        read_row({"messages": [*CHAT, CHAT[0], {**CHAT[1], **change}]}, ExampleFormat.MESSAGES, reading)
    assert caught.value.reason is Reason.BROKEN
    sample, _ = read_row({"messages": [CHAT[0], {**CHAT[1], "train": True}]}, ExampleFormat.MESSAGES, reading)
    assert isinstance(sample, Conversation)
    assert sample.whole


def test_the_error_of_a_template_is_told(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    preparer = Preparer(tokenizer_with("gemma3", tiny_tokenizer), PreparationSettings())
    with pytest.raises(RowError, match="roles must alternate") as caught:
        preparer.prepare(
            {"messages": [CHAT[0], {"role": "user", "content": "x" * 900}, CHAT[1]]}, ExampleFormat.MESSAGES
        )
    assert caught.value.reason is Reason.REFUSED


def test_replies_outside_of_generation_marks_are_not_the_templates_refusal(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% generation %}{% endgeneration %}{% endfor %}"
    )
    preparer = Preparer(tokenizer, PreparationSettings())
    with pytest.raises(RowError, match="No token of it is trained") as caught:
        preparer.prepare({"messages": CHAT}, ExampleFormat.MESSAGES)
    assert caught.value.reason is Reason.UNTRAINED


def test_templates_get_the_variables_of_the_row(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    tokenizer = tokenizer_with("qwen3", tiny_tokenizer)
    preparer = Preparer(tokenizer, PreparationSettings())
    row = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    (branch,) = preparer.prepare(row, ExampleFormat.MESSAGES).branches
    (thinking,) = preparer.prepare({"messages": CHAT}, ExampleFormat.MESSAGES).branches
    assert branch.token_ids == thinking.token_ids
    assert branch.trained < thinking.trained  # the generation prompt writes the empty thought, not the model


def test_of_ranked_replies_the_best_and_the_worst_are_a_pair(tmp_path: Path, tiny_tokenizer: Any) -> None:
    pairs = evolve(READING, format=ExampleFormat.PAIRS)
    plain = Preparer(tiny_tokenizer, PreparationSettings()).prepare(PAIR, ExampleFormat.PAIRS)
    ranked = [(3, "eight"), (1, "seven"), (2, "nine")]
    nectar = {"prompt": PAIR["prompt"], "answers": [{"answer": text, "rank": float(rank)} for rank, text in ranked]}
    as_messages = [{"rank": r, "completion": [{"role": "assistant", "content": text}]} for r, text in ranked]
    nemo = {"context": CHAT[:1], "completions": as_messages, "weight": 0.5}
    for number, row in enumerate((nectar, nemo)):
        tied = {**row, "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 1}], "prompt": "x"}
        tied.pop("completions", None)
        broken = {key: [{"rank": 1}] if isinstance(value, list) else value for key, value in row.items()}
        found = prepared(
            opened(write(tmp_path / f"{number}.jsonl", row, tied, broken), pairs), tiny_tokenizer, reading=pairs
        )
        assert {reason: drop.count for reason, drop in found.report.dropped.items()} == {
            Reason.TIED: 1,
            Reason.BROKEN: 1,
        }
        (example,) = [found[index] for index in range(len(found))]
        assert example.weight == row.get("weight", 1.0)
        for branch, wanted in zip(example.branches, plain.branches, strict=True):
            assert tuple(branch.token_ids_T.tolist()) == wanted.token_ids
            assert tuple(branch.weights_T.tolist()) == wanted.weights
        with pytest.raises(DataError, match="train sft does not learn from"):
            opened(tmp_path / f"{number}.jsonl")
    named = evolve(pairs, input_key="context")
    made = Preparer(tiny_tokenizer, PreparationSettings(reading=named)).prepare(nemo, ExampleFormat.PAIRS)
    assert made.branches == plain.branches


def test_each_better_reply_is_a_pair_with_each_worse(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Equal ranks make no pair; a row that cannot be used is counted once, by its line."""
    reading = evolve(READING, format=ExampleFormat.PAIRS, all_pairs=True)
    ranked = [(3, "eight"), (1, "seven"), (2, "nine"), (2, "ten")]
    row = {"prompt": "Which?", "answers": [{"answer": text, "rank": rank} for rank, text in ranked]}
    tied = {**row, "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 1}]}
    plain = {"prompt": "Which?", "chosen": "one", "rejected": "two"}
    mixture = opened(write(tmp_path / "rows.jsonl", row, tied, plain), reading)
    found = prepared(mixture, tiny_tokenizer, reading=reading)
    texts = [
        tuple(tiny_tokenizer.decode(branch.token_ids_T[branch.weights_T > 0]) for branch in found[index].branches)
        for index in range(len(found))
    ]
    wanted = [("seven", "nine"), ("seven", "ten"), ("seven", "eight"), ("nine", "eight"), ("ten", "eight")]
    wanted.append(("one", "two"))
    assert [tuple(text.removesuffix("<|im_end|>") for text in pair) for pair in texts] == wanted
    (drop,) = found.report.dropped.values()
    assert (drop.count, found.report.dropped.keys()) == (1, {Reason.TIED})
    source, number = mixture.source(5)
    assert source.place(number).endswith("rows.jsonl:2")


def test_which_rows_make_pairs_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = evolve(READING, format=ExampleFormat.PAIRS, all_pairs=True)
    row = {"prompt": "Which?", "answers": [{"answer": text, "rank": rank} for rank, text in enumerate("abc")]}
    path, cache = write(tmp_path / "rows.jsonl", *[row] * 200), tmp_path / "cache"
    read: list[int] = []
    whole = JsonLines.__getitem__

    def counted(lines: JsonLines, index: int) -> Any:
        read.append(index)
        return whole(lines, index)

    monkeypatch.setattr(JsonLines, "__getitem__", counted)
    first = opened(path, reading, cache_dir=cache)
    assert (len(first), len(set(read))) == (600, 200)
    read.clear()
    again = opened(path, reading, cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    assert len(set(read)) <= LOOKED_AT
    (kept,) = (cache / "pairs").iterdir()
    kept.write_bytes(b"damaged")
    with capture_logs() as told:
        assert opened(path, reading, cache_dir=cache).fingerprint == first.fingerprint
    assert "damaged" in told[0]["event"]
    write(path, row)
    assert len(opened(path, reading, cache_dir=cache)) == 3


# Rows that cannot be used

BAD: list[tuple[Mapping[str, Any], ExampleFormat, Reason]] = [
    ({"messages": None}, ExampleFormat.MESSAGES, Reason.EMPTY),
    ({"messages": []}, ExampleFormat.MESSAGES, Reason.EMPTY),
    ({}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": "text"}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [7]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [{"role": "user"}]}, ExampleFormat.MESSAGES, Reason.EMPTY),
    ({"messages": [{"role": 3, "content": "x"}]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [{"role": "wizard", "content": "x"}]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [CHAT[0], {"role": "assistant", "content": 5}]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, ExampleFormat.MESSAGES, Reason.EMPTY),
    ({"messages": CHAT[:1]}, ExampleFormat.MESSAGES, Reason.UNTRAINED),
    ({"messages": [{**CHAT[0], "train": True}, CHAT[1]]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "weight": -1}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "weight": 0}, ExampleFormat.MESSAGES, Reason.UNTRAINED),
    ({"messages": CHAT, "weight": float("nan")}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "weight": 10**400}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "weight": 1e300}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "weight": 1e-300}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": [CHAT[0], {**CHAT[1], "weight": 10**400}]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "tools": "{"}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "tools": [3]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"messages": CHAT, "chat_template_kwargs": 3}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"conversations": [{"from": "elf", "value": "x"}]}, ExampleFormat.SHAREGPT, Reason.BROKEN),
    ({"conversations": [{"from": "function_call", "value": "{"}]}, ExampleFormat.SHAREGPT, Reason.BROKEN),
    ({"prompt": "", "completion": "x"}, ExampleFormat.COMPLETION, Reason.EMPTY),
    ({"prompt": "x", "completion": ""}, ExampleFormat.COMPLETION, Reason.EMPTY),
    ({"prompt": "x"}, ExampleFormat.COMPLETION, Reason.BROKEN),
    ({"prompt": "x", "completion": 3.5}, ExampleFormat.COMPLETION, Reason.BROKEN),
    ({"instruction": None, "output": "x"}, ExampleFormat.ALPACA, Reason.EMPTY),
    ({"instruction": "x", "output": "y", "history": [["a"]]}, ExampleFormat.ALPACA, Reason.BROKEN),
    ({"text": ""}, ExampleFormat.TEXT, Reason.EMPTY),
    ({"text": 3}, ExampleFormat.TEXT, Reason.BROKEN),
    ({"input_ids": [5, 6], "labels": [5]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "labels": [6, -100]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "labels": [-100, -100]}, ExampleFormat.TOKENS, Reason.UNTRAINED),
    ({"input_ids": [5], "labels": [5]}, ExampleFormat.TOKENS, Reason.UNTRAINED),
    ({"input_ids": [5, 10**9]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": "56"}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "loss_mask": 3}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "attention_mask": [1]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "attention_mask": [1, 2]}, ExampleFormat.TOKENS, Reason.BROKEN),
    ({"input_ids": [5, 6], "attention_mask": [0, 0]}, ExampleFormat.TOKENS, Reason.EMPTY),
    ({"messages": CHAT, "images": ["a.png"]}, ExampleFormat.MESSAGES, Reason.BROKEN),
    ({"text": "x", "image": {"bytes": "a"}}, ExampleFormat.TEXT, Reason.BROKEN),
    ({"instruction": "x", "output": "y", "input": 5}, ExampleFormat.ALPACA, Reason.BROKEN),
    ({"instruction": "x", "output": "y", "system": ["s"]}, ExampleFormat.ALPACA, Reason.BROKEN),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": 5},
        ExampleFormat.SHAREGPT,
        Reason.BROKEN,
    ),
]


@pytest.mark.parametrize(("row", "kind", "reason"), BAD)
def test_a_bad_row_has_a_reason(
    row: Mapping[str, Any], kind: ExampleFormat, reason: Reason, tiny_tokenizer: Any
) -> None:
    with pytest.raises(RowError) as caught:
        Preparer(tiny_tokenizer, PreparationSettings()).prepare(row, kind)
    assert caught.value.reason is reason
    assert caught.value.sentence.endswith(".")


def test_steps_that_end_within_a_token_are_not_the_templates_refusal(tiny_tokenizer: Any) -> None:
    row = {"prompt": "What is 3 plus 4?", "completions": ["1", "2"], "labels": [True, False]}
    settings = PreparationSettings(reading=ReadingSettings(format=ExampleFormat.STEPS, separator=""))
    with pytest.raises(RowError, match="Two steps end within one token") as caught:
        Preparer(tiny_tokenizer, settings).prepare(row, ExampleFormat.STEPS)
    assert caught.value.reason is Reason.STEPS


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in ExampleFormat if kind is not ExampleFormat.AUTO]),
    noise=st.dictionaries(
        st.sampled_from(["messages", "conversations", "prompt", "completion", "text", "input_ids", "labels", "tools",
                         "weight", "instruction", "output", "history", "system", "chat_template_kwargs",
                         "chosen", "rejected", "margin", "answers", "completions", "context", "attention_mask",
                         "images", "input"]),
        json_values,
        max_size=3,
    ),
    based=st.booleans(),
)  # fmt: skip
def test_no_row_raises_anything_else(
    kind: ExampleFormat, noise: Mapping[str, Any], based: bool, tiny_tokenizer: Any
) -> None:
    row = {**(ROWS.get(kind, PAIR) if based else {}), **noise}
    try:
        made = Preparer(tiny_tokenizer, PreparationSettings()).prepare(row, kind)
    except RowError:
        return
    assert all(branch.trained for branch in made.branches)


def test_values_too_large_or_nested_too_deeply_are_refused(tiny_tokenizer: Any) -> None:
    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    with pytest.raises(RowError) as caught:
        preparer.prepare({"messages": [CHAT[0], {"role": "assistant", "content": "x" * 2**19}]}, ExampleFormat.MESSAGES)
    assert caught.value.reason is Reason.OVERLONG
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RowError) as caught:
        preparer.prepare({"messages": deep}, ExampleFormat.MESSAGES)
    assert len(caught.value.sentence) < 3000


# All rows of a dataset


def test_every_row_is_used_or_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"messages": CHAT},
        b'{"messages": [',
        b"",
        {"messages": []},
        b'{"messages": "\xff"}',
        [1],
        {"messages": [CHAT[0], {"role": "assistant", "content": "x" * 500}]},
        {"messages": CHAT[:1]},
    )
    found = prepared(opened(path), tiny_tokenizer, max_tokens=100)
    report = found.report
    assert (report.rows, report.used, len(found)) == (7, 1, 1)
    assert {reason: drop.count for reason, drop in report.dropped.items()} == {
        Reason.BROKEN: 3,
        Reason.EMPTY: 1,
        Reason.OVERLONG: 1,
        Reason.UNTRAINED: 1,
    }
    assert report.dropped[Reason.BROKEN].place == f"{path}:2"  # lines are counted as editors do
    assert report.dropped[Reason.OVERLONG].place == f"{path}:7"
    assert report.over_limit == 1
    assert report.used + report.dropped_rows == report.rows
    assert DataReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    with pytest.raises(DataError, match=r"6 of 7 rows of data.dataset cannot be used, more than --data.max_dropped"):
        report.check(0.5, "data.dataset")
    report.check(0.9, "data.dataset")
    assert any(str(report.trained_tokens) in value for _, value in report.lines())


FILES = int(os.environ.get("ROLLGRAD_FUZZ_FILES", "30"))
"""Files that are made up; a long test takes 10,000."""
GOOD = {
    ExampleFormat.PAIRS: [PAIR, {"chosen": "It is seven.", "rejected": "It is eight."}],
    ExampleFormat.UNPAIRED: [{"prompt": "Three?", "completion": "yes", "label": True}],
    ExampleFormat.AUTO: [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}],
}
LINES: list[Any] = [
    b"", b"  ", b"\xff\xfe", b'{"messages": "\xff"}', b'{"messages": [', b"[1]", b"null", b"{}", b"[" * 3000, b"\x00",
    b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b", "completion": "c", "label": 1, "messages": null}',
    {"messages": [{"role": "user", "content": "\ud800"}, CHAT[1]], "prompt": "a", "chosen": "\ud83d", "rejected": "b"},
    {**PAIR, "rejected": "seven"}, {**PAIR, "chosen": ""}, {**PAIR, "prompt": None}, {**PAIR, "prompt": "x" * 2000},
    {**PAIR, "chosen": "y" * 2**20, "messages": [CHAT[0], {"role": "assistant", "content": "y" * 2**20}]},
    {"messages": CHAT[:1]}, {"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, {"messages": [None]},
    {"prompt": "a", "completion": "b", "label": "maybe"}, {"prompt": "a", "completion": 5.5, "label": True},
]  # fmt: skip


@settings(max_examples=FILES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(list(GOOD)),
    lines=st.lists(st.sampled_from(LINES) | json_values, max_size=6),
    good=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_every_line_of_a_file_is_used_or_named(
    kind: ExampleFormat, lines: list[Any], good: int, order: Random, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """The rows that are good are used, whatever is between them."""
    written = [*lines, *GOOD[kind][:1] * good]
    order.shuffle(written)
    path = write(tmp_path / "rows.jsonl", *written)
    reading = evolve(READING, format=kind)
    refused = ""
    try:
        mixture = opened(path, reading)
    except DataError as error:
        refused = str(error)
    if refused:  # no row can be read, or columns do not tell what rows are
        assert not good or "can be read as" in refused or "has both" in refused
        assert refused.endswith(".")
        return
    found = prepared(mixture, tiny_tokenizer, reading=reading, max_tokens=500)
    report = found.report
    assert report.rows == report.used + report.dropped_rows == len(mixture)
    assert report.rows == sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    assert good <= report.used == len({int(row) for row in found.rows})
    for reason, dropped in report.dropped.items():
        assert Reason(reason)
        assert dropped.place.startswith(f"{path}:")
        assert dropped.example.endswith((".", "]", "…"))
        dropped.example.encode()
    json.dumps(report.to_json()).encode()


def test_nothing_left_is_an_error(tmp_path: Path, tiny_tokenizer: Any) -> None:
    found = prepared(opened(write(tmp_path / "a.jsonl", {"text": "", "id": 1})), tiny_tokenizer)
    with pytest.raises(DataError, match=r"No row of data\.dataset can be used: empty: 1"):
        found.report.check(1.0, "data.dataset")


def test_cut_rows_never_teach_a_stop(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [CHAT[0], {"role": "assistant", "content": "seven " * 50}]})
    whole = prepared(opened(path), tiny_tokenizer)[0].branches[0]
    cut = prepared(opened(path), tiny_tokenizer, max_tokens=60, overlong=LongRows.CUT)
    (branch,) = cut[0].branches
    stop = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert branch.token_ids_T.tolist() == whole.token_ids_T.tolist()[:60]
    assert branch.weights_T[branch.token_ids_T == stop].tolist() == [0.0]  # the user's turn
    assert cut.report.over_limit == 1
    nothing = prepared(opened(path), tiny_tokenizer, max_tokens=10, overlong=LongRows.CUT)
    assert list(nothing.report.dropped) == [Reason.CUT]
    with pytest.raises(DataError, match=r"a.jsonl:1: .* Raise --data.max_tokens"):
        prepared(opened(path), tiny_tokenizer, max_tokens=10, overlong=LongRows.ERROR)


@pytest.fixture
def _forked_processes(script_host: ScriptHost) -> Iterator[None]:
    """Processes of a test have made their imports before."""
    with forked_by(script_host.python()):
        yield


@pytest.mark.usefixtures("_forked_processes")
def test_several_processes_prepare_what_one_does(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = [{"messages": [CHAT[0], {"role": "assistant", "content": f"{i} " * (i % 7)}]} for i in range(20)]
    path = write(tmp_path / "a.jsonl", *rows, b"{")
    monkeypatch.setattr(preparation, "CHUNK", 4)
    alone, together = (prepared(opened(path), tiny_tokenizer, workers=workers) for workers in (1, 2))
    assert alone.report == together.report
    assert alone.tokens.tolist() == together.tokens.tolist()
    assert alone.rows.tolist() == together.rows.tolist()


def die(tasks: Any) -> None:
    os._exit(1)


@pytest.mark.usefixtures("_forked_processes")
def test_the_death_of_a_process_is_a_sentence(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *[{"messages": CHAT}] * 8)
    monkeypatch.setattr(preparation, "CHUNK", 4)
    monkeypatch.setattr(preparation, "_work", die)
    with pytest.raises(DataError, match=r"A process that prepares data died: .* --data.num_workers is 2"):
        prepared(opened(path), tiny_tokenizer, workers=2)


def test_prepared_data_are_found_again_unless_something_changed(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": []})
    cache = tmp_path / "cache"
    first = prepared(opened(path), tiny_tokenizer, cache)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_prepare_all", None)
        again = prepared(opened(path), tiny_tokenizer, cache)
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.report == first.report
    assert again[0].branches[0].weights_T.tolist() == first[0].branches[0].weights_T.tolist()
    assert again.fingerprint == first.fingerprint

    import copy

    other = copy.deepcopy(tiny_tokenizer)
    other.chat_template = other.chat_template.replace("<|im_end|>", "<|im_end|> ")
    key = cache_key(opened(path), tiny_tokenizer, PreparationSettings())
    reading = evolve(READING, train_on=TrainOn.LAST)
    changed = [
        cache_key(opened(path), other, PreparationSettings()),
        cache_key(opened(path), tiny_tokenizer, PreparationSettings(max_tokens=10)),
        cache_key(opened(path), tiny_tokenizer, PreparationSettings(overlong=LongRows.CUT)),
        cache_key(opened(path), tiny_tokenizer, PreparationSettings(template_kwargs={"a": True})),
        cache_key(opened(path), tiny_tokenizer, PreparationSettings(reading=reading)),
        cache_key(opened(path, max_samples=1), tiny_tokenizer, PreparationSettings()),
    ]
    assert len({key, *changed}) == 7
    write(path, {"messages": CHAT})
    assert cache_key(opened(path), tiny_tokenizer, PreparationSettings()) != key


def test_a_template_that_writes_the_date_makes_other_tokens_of_the_same_data_tomorrow(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy
    from datetime import date

    dated = copy.deepcopy(tiny_tokenizer)
    dated.chat_template = "{# strftime_now #}" + dated.chat_template
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2999, 1, 1)

    for tokenizer, same in ((dated, False), (tiny_tokenizer, True)):
        now = prepared(opened(path), tokenizer, tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "date", Tomorrow)
            later = prepared(opened(path), tokenizer, tmp_path / "cache")
        assert (later.fingerprint == now.fingerprint) is same
        assert later.origin == now.origin, "a run continues on another day"
        assert later.written_on == (None if same else "2999-01-01")


@pytest.mark.parametrize("part", ["tokens.npy", "lengths.npy", "report.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"rubbish"])
def test_a_damaged_cache_is_prepared_again(tmp_path: Path, tiny_tokenizer: Any, part: str, content: bytes) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": []})
    first = prepared(opened(path), tiny_tokenizer, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob(f"*/{part}")
    file.write_bytes(content)
    again = prepared(opened(path), tiny_tokenizer, tmp_path / "cache")
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.report == first.report
    assert file.read_bytes() != content


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    (tmp_path / "file").write_text("")
    assert len(prepared(opened(path), tiny_tokenizer, tmp_path / "file" / "cache")) == 1


def test_a_mixture_is_joined_or_drawn_by_probabilities(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *({"text": f"a {i}"} for i in range(30)))
    second = write(tmp_path / "b.jsonl", *({"messages": CHAT} for _ in range(10)))
    joined = opened(f"{first}, {second}")
    assert len(joined) == 40
    assert [part.kind for part in joined.parts] == [ExampleFormat.TEXT, ExampleFormat.MESSAGES]
    assert joined.source(39)[0].place(joined.source(39)[1]) == f"{second}:10"
    drawn = opened(f"{first},{second}", probs=(0.5, 0.5), seed=3)
    for part in range(2):  # each is read to its end
        assert {row for of, row in zip(drawn.of, drawn.rows, strict=True) if of == part} == set(range((30, 10)[part]))
    assert opened(f"{first},{second}", probs=(0.5, 0.5), seed=3).fingerprint == drawn.fingerprint
    assert opened(f"{first},{second}", probs=(0.5, 0.5), seed=4).fingerprint != drawn.fingerprint


def test_files_are_read_by_their_kind_and_missing_ones_are_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\nWhat?,That.\n")
    assert len(prepared(opened(tmp_path / "a.csv"), tiny_tokenizer)) == 1
    for name, match in (("none.jsonl", "cannot be read"), ("none.csv", "does not exist")):
        with pytest.raises(DataError, match=match):
            opened(tmp_path / name)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"No row of .*latin\.jsonl can be read; of the first: The line is not UTF-8"):
        opened(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match=r"has no column 'x': set --data\.input_key to one of its columns"):
        opened(tmp_path / "a.csv", evolve(READING, input_key="x"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has no rows"):
        opened(tmp_path / "empty.jsonl")


def test_data_are_known_by_their_content(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"text": "one"}, {"text": "two"}])
    rows.to_csv(tmp_path / "a.csv")
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_json(tmp_path / "a.json", lines=False)
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    rows.to_parquet(tmp_path / "folder" / "train.parquet")
    for name in ("a.csv", "a.parquet", "a.json", "saved", "folder"):
        before = opened(tmp_path / name).fingerprint
        copy = tmp_path / "copy" / name
        copy.parent.mkdir(exist_ok=True)
        if (tmp_path / name).is_dir():
            shutil.copytree(tmp_path / name, copy)
        else:
            shutil.copy(tmp_path / name, copy)
        for file in copy.rglob("*") if copy.is_dir() else [copy]:
            os.utime(file, (1, 1))
        assert opened(copy).fingerprint == before, name
    Dataset.from_list([{"text": "one"}, {"text": "six"}]).to_parquet(tmp_path / "copy" / "folder" / "train.parquet")
    assert opened(tmp_path / "copy" / "folder").fingerprint != opened(tmp_path / "folder").fingerprint


def test_a_tokenizer_that_cannot_say_where_tokens_lie_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    class Slow:
        backend_tokenizer = None
        name_or_path = "slow"

        def __len__(self) -> int:
            return len(tiny_tokenizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_tokenizer, name)

    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(ConfigurationError, match="fast tokenizer"):
        prepared(opened(path), Slow())


def test_branches_of_a_row_share_their_prompt(tmp_path: Path, tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    tokenizer = tokenizer_with("qwen3", tiny_tokenizer)
    path = write(tmp_path / "a.jsonl", {"messages": [*CHAT, *CHAT]})
    found = prepared(opened(path), tokenizer)
    first, second = found[0].branches
    assert first.prompt_length == second.prompt_length > 10
    assert found.report.branched_rows == 1
    assert found.report.branches == 2
    assert first.token_ids_T[: first.prompt_length].equal(second.token_ids_T[: first.prompt_length])


def test_examples_of_both_sets_are_found(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Token for token, with the same ones trained, whatever stands in the rows beside them."""

    def made(name: str, *rows: Any) -> PreparedExamples:
        return prepared(opened(write(tmp_path / name, *rows)), tiny_tokenizer, tmp_path / "cache")

    rows = [{"messages": [{"role": "user", "content": f"Is {n}?"}, CHAT[1]]} for n in range(20)]
    learned = made("learned.jsonl", *rows[:12])
    assert made("apart.jsonl", *rows[12:]).repeated_in(learned) == []
    longer = {"messages": [*rows[3]["messages"], *CHAT]}
    mixed = made("mixed.jsonl", rows[15], {**rows[3], "id": 1}, {"messages": []}, longer, rows[11])
    assert mixed.repeated_in(learned) == [1, 3]
    assert learned.repeated_in(mixed) == [3, 11]
    first_only = [{**rows[0]["messages"][1], "train": False}, *CHAT]
    before, after = ({"messages": [rows[0]["messages"][0], *more]} for more in (first_only, [CHAT[1], *CHAT]))
    assert made("some.jsonl", before).repeated_in(made("all.jsonl", after)) == []
    assert learned.repeated_in(made("nothing.jsonl", {"messages": []})) == []
