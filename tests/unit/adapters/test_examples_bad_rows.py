"""Rows that cannot be used have a reason."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.domain.errors import DataError
from tests.example_rows import CHAT, PAIR, READING, ROWS, json_values, opened, prepared, write

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
