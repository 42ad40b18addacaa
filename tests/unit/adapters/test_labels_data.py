"""Rows with a label, and pairs, become replies that are good or bad."""

from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.chat.row_error import Reason
from rollgrad.adapters.data.examples.prepared import PreparedLabels
from rollgrad.adapters.data.examples.recognition import ReadingSettings, find_format
from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.domain.errors import DataError
from tests.example_rows import opened, prepared, write
from tests.unit.adapters.test_pairs_data import ASKED, EIGHT, SEVEN

READING = ReadingSettings(format=ExampleFormat.UNPAIRED)


def labels_of(path: Path, tokenizer: Any, *rows: Any, reading: ReadingSettings = READING) -> PreparedLabels:
    mixture = opened(write(path / "labels.jsonl", *rows), reading)
    return PreparedLabels(prepared(mixture, tokenizer, path / "cache", reading=reading))


def told(labels: PreparedLabels, tokenizer: Any) -> list[tuple[str, bool, int]]:
    """The trained text, the label and the row of each."""
    found = [labels[index] for index in range(len(labels))]
    assert [label.place for label in found] == list(range(len(labels)))
    return [
        (
            tokenizer.decode(label.reply.token_ids_T[label.reply.weights_T > 0]).removesuffix("<|im_end|>"),
            label.desirable,
            label.row,
        )
        for label in found
    ]


@pytest.mark.parametrize("good", [True, 1, 1.0, "true", "True ", "1"])
@pytest.mark.parametrize("bad", [False, 0, "FALSE", "0"])
def test_labels_are_booleans_numbers_or_words(good: Any, bad: Any, tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        {"prompt": "What is 3 plus 4?", "completion": "seven", "label": good, "weight": 0.5},
        {"prompt": ASKED, "completion": [EIGHT], "label": bad},
    ]
    labels = labels_of(tmp_path, tiny_tokenizer, *rows)
    assert told(labels, tiny_tokenizer) == [("seven", True, 0), ("eight", False, 1)]
    assert [labels[index].weight for index in range(2)] == [0.5, 1.0]


def test_a_pair_is_a_good_and_a_bad_reply(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The bad ones come last, so that held-out neighbours, which are mismatched, answer different prompts, as
    their keys say."""
    rows = [
        {"chosen": [*ASKED, SEVEN], "rejected": [*ASKED, EIGHT]},
        {"prompt": "Name a colour.", "chosen": "blue", "rejected": "seven"},
    ]
    labels = labels_of(tmp_path, tiny_tokenizer, *rows)
    assert told(labels, tiny_tokenizer) == [
        ("seven", True, 0),
        ("blue", True, 1),
        ("eight", False, 0),
        ("seven", False, 1),
    ]
    keys = [labels.prompt_key(index) for index in range(4)]
    assert keys == [labels[index].reply.prompt_key for index in range(4)]
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("label", ["maybe", 2, 0.5, None, [True], "", -1])
def test_other_labels_are_broken(label: Any, tmp_path: Path, tiny_tokenizer: Any) -> None:
    good = {"prompt": "a", "completion": "b", "label": True}
    labels = labels_of(tmp_path, tiny_tokenizer, good, good | {"label": label})
    assert told(labels, tiny_tokenizer) == [("b", True, 0)]
    (drop,) = labels.examples.report.dropped.items()
    assert drop[0] == Reason.BROKEN
    assert "label" in drop[1].example


def test_formats_and_columns(tmp_path: Path, tiny_tokenizer: Any) -> None:
    reading = ReadingSettings(
        format=ExampleFormat.UNPAIRED, input_key="question", output_key="answer", label_key="upvoted"
    )
    row = {"question": "What is 3 plus 4?", "answer": "seven", "upvoted": True}
    assert told(labels_of(tmp_path, tiny_tokenizer, row, reading=reading), tiny_tokenizer) == [("seven", True, 0)]
    assert find_format(["prompt", "chosen", "rejected"], "set", READING) is ExampleFormat.PAIRS
    with pytest.raises(DataError, match=r"no column 'completion' and no column 'label'.*--data.completion_key and"):
        find_format(["prompt", "answer"], "set", READING)
    with pytest.raises(DataError, match=r"both labelled replies .* and pairs"):
        find_format(["prompt", "completion", "label", "chosen", "rejected"], "set", READING)
    with pytest.raises(DataError, match=r"no column 'upvoted': set --data.label_key"):
        find_format(["question", "answer"], "set", reading)
    with pytest.raises(DataError, match="train kto learns from"):
        find_format(["prompt", "completion", "label"], "set", ReadingSettings(), [True, False])
