"""Files and folders of rows are opened, mixed and known by their content."""

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.domain.errors import DataError
from tests.example_rows import CHAT, READING, opened, prepared, write


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
