"""Rows of ranked replies become pairs."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.adapters.chat.row_error import Reason
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.sources import LOOKED_AT, JsonLines
from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.domain.errors import DataError
from tests.example_rows import CHAT, PAIR, READING, opened, prepared, write


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
