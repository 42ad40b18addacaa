"""Rows that are read while training goes on: each once a pass, the same after an interruption, broken ones counted."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.data.examples import streaming
from rollgrad.adapters.data.examples.preparation import prepare_examples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.sources import is_local, open_sources
from rollgrad.adapters.data.examples.streaming import StreamedExamples, demonstration, stream_rows
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.errors import DataError

ROWS, BUFFER = 7, 3
NO_ROWS = "has no rows: at least one is needed"


def row(number: int) -> dict[str, str]:
    return {"prompt": "What is it?", "completion": f"It is {number}."}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number)) + "\n\n" for number in range(ROWS)))
    return path


def streamed(
    path: Path, tokenizer: Any, *, buffer: int = BUFFER, max_dropped: float = 1.0
) -> StreamedExamples[Demonstration]:
    preparer = Preparer(tokenizer, PreparationSettings())
    return StreamedExamples(
        lambda: stream_rows(str(path), "train"),
        ExampleFormat.COMPLETION,
        preparer,
        demonstration,
        buffer=buffer,
        seed=1,
        max_dropped=max_dropped,
    )


def tokens(examples: StreamedExamples[Demonstration], start: int, stop: int) -> list[tuple[int, ...]]:
    found = [examples.at(position) for position in range(start, stop)]
    return [tuple(example.branches[0].token_ids_T.tolist()) for example in found if example is not None]


def test_every_row_comes_once_a_pass_as_if_it_had_been_prepared(data: Path, tiny_tokenizer: Any) -> None:
    mixture = open_sources(str(data), split="train", probs=None, seed=0, max_samples=None, settings=ReadingSettings())
    prepared = prepare_examples(mixture, tiny_tokenizer, PreparationSettings(), cache_dir=None)
    assert [prepared.length(index) for index in range(ROWS)] == [len(prepared[index]) for index in range(ROWS)]
    everything = Counter(tuple(prepared[index].branches[0].token_ids_T.tolist()) for index in range(ROWS))
    examples = streamed(data, tiny_tokenizer)
    first, second = tokens(examples, 0, ROWS), tokens(examples, ROWS, 2 * ROWS)
    assert Counter(first) == Counter(second) == everything
    assert first != second, "each pass has an order of its own"
    assert (examples.report.rows, examples.report.used) == (2 * ROWS, 2 * ROWS)
    for example in filter(None, map(examples.at, range(ROWS))):
        (same,) = [
            prepared[index].branches[0]
            for index in range(ROWS)
            if prepared[index].branches[0].token_ids_T.equal(example.branches[0].token_ids_T)
        ]
        assert example.branches[0].weights_T.equal(same.weights_T)
        assert example.branches[0].prompt_length == same.prompt_length


@pytest.mark.parametrize("buffer", [1, BUFFER, 100])
def test_any_position_can_be_continued_from(data: Path, tiny_tokenizer: Any, buffer: int) -> None:
    whole = tokens(streamed(data, tiny_tokenizer, buffer=buffer), 0, 20)
    for start in (1, BUFFER, ROWS - 1, ROWS, 17):
        assert tokens(streamed(data, tiny_tokenizer, buffer=buffer), start, 20) == whole[start:]
    again = streamed(data, tiny_tokenizer, buffer=buffer)
    assert tokens(again, 15, 16) + tokens(again, 2, 3) == [whole[15], whole[2]]


def test_rows_that_cannot_be_used_are_counted_and_told_once(
    data: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with data.open("ab") as file:
        file.write(b'not JSON\n{"prompt": "\xff"}\n{"prompt": "x", "completion": ""}\n')
    examples = streamed(data, tiny_tokenizer, buffer=1, max_dropped=0.2)
    with capture_logs() as told:
        assert [examples.at(position) is None for position in range(ROWS + 3)] == [False] * ROWS + [True] * 3
        examples.at(ROWS)
    assert [entry["reason"] for entry in told] == ["broken", "empty"]
    assert f"{data}:15: The line is not JSON: Expecting value at character 1." in told[0]["event"]
    assert {reason: drop.count for reason, drop in examples.report.dropped.items()} == {"broken": 3, "empty": 1}
    monkeypatch.setattr(streaming, "JUDGED_FROM", 5)
    with pytest.raises(DataError, match=r"5 of 12 rows of data.dataset cannot be used, more than --data.max_dropped"):
        examples.at(ROWS)


def test_a_row_that_is_too_long_ends_a_run_where_that_is_an_error(data: Path, tiny_tokenizer: Any) -> None:
    def streamed_to(overlong: LongRows) -> StreamedExamples[Demonstration]:
        settings = PreparationSettings(max_tokens=5, overlong=overlong)
        return StreamedExamples(
            lambda: stream_rows(str(data), "train"),
            ExampleFormat.COMPLETION,
            Preparer(tiny_tokenizer, settings),
            demonstration,
            buffer=1,
            seed=1,
            max_dropped=1.0,
            overlong=overlong,
        )

    with pytest.raises(DataError, match=rf"{data}:1: It has .* let such rows be dropped or cut"):
        streamed_to(LongRows.ERROR).at(0)
    dropped = streamed_to(LongRows.DROP)
    assert dropped.at(0) is None
    assert list(dropped.report.dropped) == ["overlong"]


def test_data_without_rows_are_an_error(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=NO_ROWS):
        streamed(tmp_path / "none.jsonl", tiny_tokenizer).at(0)
    with pytest.raises(DataError, match=r"missing\.jsonl cannot be read"):
        streamed(tmp_path / "missing.jsonl", tiny_tokenizer).at(0)


def test_other_files_and_the_hub_give_their_rows(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [row(number) for number in range(ROWS)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = list(stream_rows(str(tmp_path / "rows.parquet"), "train"))
    assert [{key: each.content[key] for key in rows[0]} for each in found] == rows  # type: ignore[index]
    assert found[-1].place == f"{tmp_path / 'rows.parquet'} row {ROWS}"

    load, asked = datasets.load_dataset, []

    def from_the_hub(name: str, configuration: str | None, **settings: Any) -> Any:
        asked.append((name, configuration, settings))
        return load("json", data_files=str(data), streaming=settings["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    assert not any(map(is_local, ("owner/name:config", "owner/name-v1.5", "owner/name-v1.5:config")))
    assert all(map(is_local, ("missing.csv", "./missing", str(tmp_path))))
    with pytest.raises(DataError, match=r"x cannot be read \(File name too long\): check the path\."):
        next(stream_rows("x" * 300, "train"))
    assert [each.content for each in stream_rows("owner/name:config@part", "train")] == rows
    assert asked == [("owner/name", "config", {"data_dir": "part", "streaming": True})]


def test_files_of_a_pattern_are_streamed_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": 2}\n\n{"text": 3}\n'))
    (tmp_path / "a.jsonl").write_text('{"text": 1}')
    rows = list(stream_rows(f"{tmp_path}/*.jsonl*", "train"))
    assert [row.content for row in rows] == [{"text": 1}, {"text": 2}, {"text": 3}]
    assert [row.place for row in rows] == [
        f"{tmp_path}/{place}" for place in ("a.jsonl:1", "b.jsonl.gz:1", "b.jsonl.gz:3")
    ]
