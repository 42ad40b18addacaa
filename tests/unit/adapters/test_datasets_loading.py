"""load_dataset: formats, splits, mixing, and one sentence for each thing that goes wrong."""

import bz2
import errno
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.data.datasets import loading
from rollgrad.adapters.data.datasets.columns import Columns, find_columns
from rollgrad.adapters.data.datasets.files import split_configuration
from rollgrad.adapters.data.datasets.loading import load_dataset, origin
from rollgrad.adapters.data.datasets.several import distinct_names
from rollgrad.domain.errors import DataError

ROWS = [{"input": "3+4?", "answer": "7"}, {"input": "2+2?", "answer": "4"}, {"input": "1+1?", "answer": "2"}]


def load(spec: Any, *, split: str = "train", probs: tuple[float, ...] | None = None, **rest: Any) -> Any:
    return load_dataset(str(spec), split=split, probs=probs, seed=0, max_samples=rest.get("max_samples"))


def table(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_csv(path: Path) -> None:
    path.write_text("input,answer\n" + "".join(f"{row['input']},{row['answer']}\n" for row in ROWS))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "jsonl": jsonl,
    "json": lambda path: path.write_text(json.dumps(ROWS)),
    "ndjson": jsonl,
    "csv": as_csv,
    "tsv": lambda path: path.write_text("input\tanswer\n" + "".join(f"{r['input']}\t{r['answer']}\n" for r in ROWS)),
    "parquet": lambda path: table(ROWS).to_parquet(str(path)),
}


def test_a_file_may_have_one_row(tmp_path: Path) -> None:
    only = {"messages": [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]}
    (tmp_path / "chat.json").write_text(json.dumps(only))
    assert load(tmp_path / "chat.json")["messages"][:] == [only["messages"]]


@pytest.mark.parametrize("kind", WRITERS)
def test_each_file_format_is_read_with_the_stem_as_datasource(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"sums.{kind}"
    WRITERS[kind](path)
    rows = load(path, split="test")
    assert rows["input"][:] == [row["input"] for row in ROWS]
    assert set(rows["datasource"]) == {"sums"}


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_what_separates_columns_is_told_by_the_first_line(separator: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"question{separator}answer\n3+4, and then?{separator}7\n")
    assert load(tmp_path / "a.csv")[0] == {"question": "3+4, and then?", "answer": 7, "datasource": "a"}


def test_csv_loses_no_word_and_no_field(tmp_path: Path) -> None:
    """pandas takes NA for no value, 007 for 7, and the first of too many fields for the row's name."""
    (tmp_path / "a.csv").write_bytes(
        b"\xef\xbb\xbfquestion,code,right,score,size,note\r\n"
        b'NA,007,True,1.5,1e3,"5"" of\r\nrain"\r\n'
        b"null,12,false,2,,\r\n"
        b"None,3,True,.25,99999999999999999999,None\r\n"
    )
    rows = load(tmp_path / "a.csv")
    assert rows["question"][:] == ["NA", "null", "None"]
    assert rows["code"][:] == ["007", "12", "3"]
    assert rows["right"][:] == [True, False, True]
    assert rows["score"][:] == [1.5, 2.0, 0.25]
    assert rows["size"][:] == [1e3, None, 1e20]
    assert rows["note"][:] == ['5" of\r\nrain', None, "None"]


def test_whole_numbers_stay_whole_where_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,weight,empty\na,7,0.5,\nb,,,\nc,12,1.5,\n")
    rows = load(tmp_path / "a.csv")
    assert [str(answer) for answer in rows["answer"]] == ["7", "None", "12"]
    assert rows["weight"][:] == [0.5, None, 1.5]
    assert rows["empty"][:] == [None] * 3
    table([{"answer": 7.0}, {"answer": float("inf")}, {"answer": None}]).to_parquet(str(tmp_path / "b.parquet"))
    assert load(tmp_path / "b.parquet")["answer"][:] == [7.0, float("inf"), None]


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}


@pytest.mark.parametrize("compressed", COMPRESSORS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_compressed_files_are_read(kind: str, compressed: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "plain")
    content = (tmp_path / "plain").read_bytes()
    (tmp_path / f"sums.{kind}.{compressed}").write_bytes(COMPRESSORS[compressed](content))
    rows = load(tmp_path / f"sums.{kind}.{compressed}")
    assert rows["input"][:] == [row["input"] for row in ROWS]
    assert set(rows["datasource"]) == {"sums"}


def test_a_pattern_is_all_its_files_by_their_names(tmp_path: Path) -> None:
    """Some lack a column, have numbers where others have texts, or have no rows."""
    table(ROWS[2:]).to_parquet(str(tmp_path / "train-2.parquet"))
    jsonl(tmp_path / "train-1.jsonl", [{"input": "a", "answer": 1, "more": True}])
    (tmp_path / "train-0.csv").write_text("input\n2+2?\n")
    (tmp_path / "train-3.csv").write_text("input\n")
    with capture_logs() as logs:
        rows = load(tmp_path / "train-*")
    assert rows["input"][:] == ["2+2?", "a", "1+1?"]
    assert rows["answer"][:] == [None, "1", "2"]
    assert rows["more"][:] == [None, True, None]
    assert set(rows["datasource"]) == {"train"}
    matched, without_rows = logs
    assert (matched["files"], Path(matched["first"]).name) == (4, "train-0.csv")
    assert without_rows["files"] == 1
    assert "train-3.csv has no rows" in without_rows["first"]


def test_a_saved_folder_and_its_arrow_file(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    table(ROWS).save_to_disk(str(folder))
    assert load(folder)[1] == {**ROWS[1], "datasource": "saved"}
    assert load(next(folder.glob("*.arrow")))[1]["input"] == ROWS[1]["input"]


def test_a_folder_of_files_is_read_as_the_files_are(tmp_path: Path) -> None:
    """By their splits; files that lack a column, and words that pandas takes for no value, are read in it, too."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train-1.csv").write_text("input,answer\nNA,007\n")
    (tmp_path / "rows" / "train-2.csv.gz").write_bytes(gzip.compress(b"input,more\nb,1\n"))
    as_csv(tmp_path / "rows" / "test.csv")
    rows = load(tmp_path / "rows")
    assert (rows["input"][:], rows["answer"][:]) == (["NA", "b"], ["007", None])
    assert set(rows["datasource"]) == {"rows"}
    assert len(load(tmp_path / "rows", split="test")) == len(ROWS)
    with pytest.raises(DataError, match=r"no split 'dev'.*train, test"):
        load(tmp_path / "rows", split="dev")


def test_a_datasource_column_is_kept(tmp_path: Path) -> None:
    rows = load(jsonl(tmp_path / "a.jsonl", [{"input": "x", "datasource": "mine"}]))
    assert rows["datasource"][:] == ["mine"]


def test_the_split_asked_for_is_read(tmp_path: Path) -> None:
    parts = {"train": table(ROWS), "test": table(ROWS[:1])}
    from datasets import DatasetDict

    DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert (len(load(tmp_path / "d")), len(load(tmp_path / "d", split="test"))) == (3, 1)
    with pytest.raises(DataError, match=r"no split 'dev'.*train, test"):
        load(tmp_path / "d", split="dev")


def test_a_slice_of_a_split_is_one_of_each_dataset(tmp_path: Path) -> None:
    """Also of files, which are one split; before, all rows were read in silence."""
    from datasets import DatasetDict

    DatasetDict({"train": table(ROWS), "test": table(ROWS[:1])}).save_to_disk(str(tmp_path / "d"))
    lines = jsonl(tmp_path / "a.jsonl", [{"input": str(number)} for number in range(10)])
    assert load(lines, split="train[:20%]")["input"][:] == ["0", "1"]
    assert load(lines, split="train[-1:]")["input"][:] == ["9"]
    assert load(tmp_path / "d", split="train[1:]")["input"][:] == [row["input"] for row in ROWS[1:]]
    both = load(f"{lines},{tmp_path / 'd'}", split="train[:1]")
    assert both["input"][:] == ["0", ROWS[0]["input"]]
    with pytest.raises(DataError, match=r"The slice \[3:\] of a split has none of the 3 rows of .*d: change --data"):
        load(tmp_path / "d", split="train[3:]")


def test_datasets_follow_one_another_without_probabilities(tmp_path: Path) -> None:
    one, two = jsonl(tmp_path / "one.jsonl"), jsonl(tmp_path / "two.jsonl", ROWS[:2])
    rows = load(f"{one}, {two}", max_samples=4)
    assert rows["datasource"][:] == ["one", "one", "one", "two"]


def test_probabilities_mix_until_every_row_was_read(tmp_path: Path) -> None:
    names = [jsonl(tmp_path / f"{n}.jsonl", [{"input": f"{n}{i}"} for i in range(40)]) for n in "ab"]
    spec = f"{names[0]},{names[1]}"
    rows = load(spec, probs=(0.25, 0.75))
    assert {f"{n}{i}" for n in "ab" for i in range(40)} <= set(rows["input"])
    assert 0.15 < rows["datasource"][:].count("a") / len(rows) < 0.35
    assert rows["input"][:] == load(spec, probs=(0.25, 0.75))["input"][:]


def latin(tmp_path: Path) -> Path:
    (tmp_path / "latin.csv").write_bytes("question\nf\u00fcnf?\n".encode("latin-1"))
    return tmp_path / "latin.csv"


def latin_rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").write_bytes('[{"input": "x"},\n{"input": "f\u00fcnf"}]'.encode("latin-1"))
    return tmp_path / "rows.json"


def mixed_types_and_an_empty_line(tmp_path: Path) -> Path:
    (tmp_path / "gap.jsonl").write_text('{"answer": 2}\n\n{"answer": "two"}\n')
    return tmp_path / "gap.jsonl"


def too_many_fields(tmp_path: Path) -> Path:
    (tmp_path / "fields.csv").write_text('question,answer\n"two\nlines",7\nred, blue?,7\n')
    return tmp_path / "fields.csv"


def open_quote(tmp_path: Path) -> Path:
    (tmp_path / "quote.csv").write_text('question,answer\na,1\nb,"2\nc,3\n')
    return tmp_path / "quote.csv"


def column_twice(tmp_path: Path) -> Path:
    (tmp_path / "twice.csv").write_text("question,answer,answer\na,1,2\n")
    return tmp_path / "twice.csv"


def latin_header(tmp_path: Path) -> Path:
    (tmp_path / "header.csv").write_bytes("f\u00fcnf\nx\n".encode("latin-1"))
    return tmp_path / "header.csv"


def broken_json(tmp_path: Path) -> Path:
    (tmp_path / "broken.jsonl").write_text('{"input": "a"}\n{"input": \n')
    return tmp_path / "broken.jsonl"


def empty_file(tmp_path: Path) -> Path:
    (tmp_path / "empty.jsonl").touch()
    return tmp_path / "empty.jsonl"


def header_only(tmp_path: Path) -> Path:
    (tmp_path / "header.csv").write_text("input,answer\n")
    return tmp_path / "header.csv"


def no_list(tmp_path: Path) -> Path:
    (tmp_path / "list.json").write_text("[]")
    return tmp_path / "list.json"


def rows_within(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").write_text(json.dumps({"data": ROWS[:2]}))
    return tmp_path / "rows.json"


def parquet_without_rows(tmp_path: Path) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"input": pyarrow.array([], pyarrow.string())}), tmp_path / "none.parquet"
    )
    return tmp_path / "none.parquet"


def folder_of_that_name(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").mkdir()
    return tmp_path / "rows.json"


def not_a_dataset(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def text_as_parquet(tmp_path: Path) -> Path:
    (tmp_path / "text.parquet").write_text("hello")
    return tmp_path / "text.parquet"


def packed(tmp_path: Path) -> Path:
    (tmp_path / "rows.zip").write_bytes(b"PK")
    return tmp_path / "rows.zip"


def cut_off(tmp_path: Path) -> Path:
    content = b"".join(json.dumps({"input": f"{place}"}).encode() + b"\n" for place in range(5000))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(content)[:-100])
    return tmp_path / "cut.jsonl.gz"


def beside_a_text(tmp_path: Path) -> Path:
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "README.md").write_text("rows")
    return tmp_path / "*"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (packed, r"rows\.zip is a file whose name does not end in \.json, .*: unpack it"),
        (cut_off, r"cut\.jsonl\.gz cannot be read as jsonl: OSError: Truncated compressed stream"),
        (beside_a_text, r"matches 1 of 2 files which do not end in .*, such as .*README\.md: narrow it"),
        (lambda tmp_path: tmp_path / "*.parquet", r"\*\.parquet is a pattern that matches no file"),
        (lambda tmp_path: tmp_path / "missing.jsonl", r"missing\.jsonl does not exist"),
        (lambda tmp_path: tmp_path / "missing_folder", "missing_folder does not exist"),
        (broken_json, r"broken\.jsonl cannot be read as jsonl: line 2 is not JSON \(Expecting value at character \d"),
        (mixed_types_and_an_empty_line, r"gap\.jsonl cannot be read as jsonl: line 2 is empty"),
        (latin, r"latin\.csv cannot be read as csv: it is no UTF-8 .*: save it as UTF-8"),
        (latin_rows, r"Line 2 of the dataset file .*rows\.json is no UTF-8 \(.*\): save it as UTF-8"),
        (latin_header, r"header\.csv cannot be read as csv: it is no UTF-8 .*: save it as UTF-8"),
        (too_many_fields, r"Line 4 of .*fields\.csv has 3 fields, but the first line 2: a text with ',' in it needs"),
        (open_quote, r"The row that begins in line 3 of .*quote\.csv is no CSV \(unexpected end of data\)"),
        (column_twice, r"twice\.csv has several columns 'answer': rename all but one"),
        (text_as_parquet, r"text\.parquet cannot be read as parquet"),
        (empty_file, r"empty\.jsonl has no rows"),
        (header_only, r"header\.csv has no rows"),
        (no_list, r"list\.json has no rows"),
        (rows_within, r"rows\.json is one object, whose 'data' is a list of 2 objects: if these are the rows, write"),
        (parquet_without_rows, r"none\.parquet has no rows"),
        (folder_of_that_name, r"rows\.json is no file"),
        (lambda tmp_path: tmp_path / ("x" * 300 + ".csv"), r"x\.csv cannot be read \(File name too long\)"),
        (lambda tmp_path: "x" * 300, r"x cannot be read \(File name too long\)"),
        (not_a_dataset, "folder cannot be read"),
        (lambda tmp_path: "", "No dataset is set"),
        (lambda tmp_path: "s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl is an address"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(make(tmp_path))
    assert "\n" not in str(caught.value)


TYPES = {"input": "string", "answer": "int64", "other": "string"}


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """A folder as the hub has them: two configurations, each in a directory, named in the README's metadata."""
    folder = tmp_path / "gsm8k"
    entries = ""
    for index, name in enumerate(("main", "socratic")):
        (folder / name).mkdir(parents=True)
        jsonl(folder / name / "train.jsonl", [{"question": f"{name}?", "answer": str(index)}])
        entries += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    return folder


def test_a_described_folder_is_read_as_the_files_are(tmp_path: Path) -> None:
    """A README.md may name configurations, types of columns and separators; only what else it says is pandas'."""
    import datasets

    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "plain.csv").write_text("input,answer,other\nNA,007,1\nnull,7,\n")
    (folder / "bars.csv").write_text("input|answer\nNA, then|007\n")
    (folder / "shifted.csv").write_text("a line before\ninput,answer\nx,7\n")
    more = {
        "plain": "",
        "bars": "  sep: '|'\n",
        "shifted": "  skiprows: 1\n",
    }
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.csv\n{own}" for name, own in more.items())
    entries += "- config_name: typed\n  data_files: plain.csv\n"
    types = "".join(f"  - name: {name}\n    dtype: {kind}\n" for name, kind in TYPES.items())
    info = f"dataset_info:\n- config_name: typed\n  features:\n{types}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}{info}---\n")
    expected = {
        "plain": {"input": ["NA", "null"], "answer": ["007", "7"], "other": [1, None]},
        "bars": {"input": ["NA, then"], "answer": ["007"]},
        "shifted": {"input": ["x"], "answer": [7]},
        "typed": {"input": ["NA", "null"], "answer": [7, 7], "other": ["1", None]},
    }
    datasets.load_dataset(str(folder), "plain", split="train")  # whose cache has the types that pandas finds
    for name, columns in expected.items():
        with capture_logs() as logs:
            rows = load(f"{folder}:{name}")
        assert {column: rows[column][:] for column in columns} == columns
        assert ["pandas reads" in line["event"] for line in logs] == [True] * (name == "shifted")
    datasets.load_dataset(str(folder), "shifted", split="train").save_to_disk(tmp_path / "saved")
    with capture_logs() as logs:
        load(tmp_path / "saved")
    assert logs == [], "nothing is read from CSV any more"


@pytest.mark.parametrize("name", ["main", "socratic"])
def test_a_configuration_is_named_behind_a_colon(configured: Path, name: str) -> None:
    rows = load(f"{configured}:{name}")
    assert (rows["question"][:], rows["datasource"][:]) == ([f"{name}?"], ["gsm8k"])
    assert len(load(f"{configured}:main,{configured}:socratic")) == 2


@pytest.mark.parametrize(
    ("suffix", "words"), [("", "has several configurations"), (":mane", "has no configuration 'mane'")]
)
def test_configurations_are_listed_where_one_is_missing(configured: Path, suffix: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"{words}: name one of main, socratic behind a colon, such as .*gsm8k:main"):
        load(f"{configured}{suffix}")


def test_a_saved_dataset_has_no_configurations(tmp_path: Path) -> None:
    table(ROWS).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="leave :main out"):
        load(f"{tmp_path / 'saved'}:main")


@pytest.mark.parametrize(
    ("name", "place", "configuration"),
    [
        ("openai/gsm8k", "openai/gsm8k", None),
        ("openai/gsm8k@main", "openai/gsm8k@main", None),
        ("openai/gsm8k:main", "openai/gsm8k", "main"),
        ("owner/name:cot@data/part:1", "owner/name@data/part:1", "cot"),
    ],
)
def test_names_are_taken_apart(name: str, place: str, configuration: str | None) -> None:
    assert split_configuration(name) == (place, configuration)


def test_the_origin_that_verl_writes_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "data_source": "openai/gsm8k"}, {"prompt": "y", "data_source": None}]
    assert load(jsonl(tmp_path / "a.jsonl", rows))["datasource"][:] == ["openai/gsm8k", "a"]


def test_data_sets_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    for folder in ("math", "code"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "test.jsonl")
    rows = load(f"{tmp_path}/math/test.jsonl,{tmp_path}/code/test.jsonl")
    assert [*dict.fromkeys(rows["datasource"])] == ["math-test", "code-test"]
    assert set(load(f"{tmp_path}/math/*,{tmp_path}/code/*")["datasource"]) == {"math", "code"}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["a/c/*", "b/c/*"], ["a-c", "b-c"]),
        (["a/c/test.jsonl", "b/c/test.jsonl", "b/test.csv"], ["a-c-test", "b-c-test", "x-b-test"]),
        (["a/test.jsonl", "a/test.csv", "b/test.jsonl"], ["a-test.jsonl", "a-test.csv", "b-test.jsonl"]),
        (["a/test.jsonl", "./a/test.jsonl"], ["test", "test"]),
        (["a/test.jsonl", "b/test.jsonl", "a-test.jsonl"], ["x-a-test", "x-b-test", "a-test"]),
    ],
)
def test_different_data_sets_never_share_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[str], expected: list[str]
) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    assert distinct_names(places, [origin(place) for place in places]) == expected


def test_data_sets_that_can_only_share_a_name_are_refused() -> None:
    with pytest.raises(DataError, match=r"/b/x\.jsonl would be called alike in metrics \(x\): rename one"):
        distinct_names(["/x.jsonl", "/b/x.jsonl", "c", "d"], ["x", "x", "x.jsonl", "b-x"])


def test_as_many_rows_are_taken_of_each_data_set(tmp_path: Path) -> None:
    names = [jsonl(tmp_path / f"{name}.jsonl", [{"input": f"{name}{i}"} for i in range(8)]) for name in "ab"]
    spec = ",".join(map(str, names))
    rows = load_dataset(spec, split="train", probs=None, seed=0, max_samples=5, evenly=True)
    assert rows["input"][:] == ["a0", "a1", "a2", "b0", "b1"]
    assert load(spec, max_samples=5)["input"][:] == ["a0", "a1", "a2", "a3", "a4"]


class Finds:
    """Finds columns as a `PromptBuilder` does."""

    def columns(self, row: Any, datasource: str) -> Columns:
        return find_columns(row, datasource, input_key=None, label_key=None, labels_are_read=True)

    found = columns


def test_data_sets_with_other_columns_are_read_as_the_first_one(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", [{"question": "a?", "answer": "1", "id": 3}])
    b = jsonl(tmp_path / "b.jsonl", [{"problem": "b?", "solution": 2, "id": "x"}])
    c = jsonl(tmp_path / "c.jsonl", [{"prompt": "c?", "reward_model": {"ground_truth": "3"}}])
    rows = load_dataset(f"{a},{b},{c}", split="train", probs=None, seed=0, max_samples=None, builder=Finds())  # type: ignore[arg-type]
    assert rows["question"][:] == ["a?", "b?", "c?"]
    assert rows["answer"][:] == ["1", "2", "3"]
    assert rows["id"][:] == ["3", "x", None]
    assert rows["problem"][:] == [None, "b?", None]


def test_numbers_of_different_sizes_fit_together(tmp_path: Path) -> None:
    """As shards have them, of which one happens to have whole numbers alone."""
    for name, column in (
        ("a", pyarrow.array([1, 2**40])),
        ("b", pyarrow.array([0.5, None], pyarrow.float32())),
        ("c", pyarrow.array([3], pyarrow.int8())),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"score": column}), tmp_path / f"{name}.parquet")
    assert load(tmp_path / "[abc].parquet")["score"][:] == [1.0, 2.0**40, 0.5, None, 3.0]
    whole = load(tmp_path / "[ac].parquet")["score"][:]
    assert (whole, type(whole[0])) == ([1, 2**40, 3], int)


def test_columns_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", [{"input": "x", "answer": "7"}])
    b = jsonl(tmp_path / "b.jsonl", [{"input": "x", "answer": [1, 2]}])
    with pytest.raises(DataError, match=r"cannot be mixed.*answer"):
        load(f"{a},{b}")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_not_taken_for_a_broken_file(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def cached(*_: object, **__: object) -> None:
        place = f"{datasets.config.HF_DATASETS_CACHE}/json" if number == errno.EACCES else None
        raise OSError(number, os.strerror(number), place)

    monkeypatch.setattr(datasets, "load_dataset", cached)
    with pytest.raises(DataError, match=r"sums.jsonl cannot be read .* set HF_HOME to a directory with room to write"):
        load(jsonl(tmp_path / "sums.jsonl"))


def test_a_home_that_is_not_there_is_not_taken_for_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "home" / ".cache" / "datasets")
    with pytest.raises(DataError, match=r"sums.jsonl cannot be read .* set HF_HOME to a directory with room to write"):
        load(jsonl(tmp_path / "sums.jsonl"))


def test_the_hub_out_of_reach_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"no-such-owner/no-such-set .*hub cannot be reached"):
        load("no-such-owner/no-such-set@main")


def test_a_folder_with_too_much_below_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a working directory is: all of it would be read."""
    monkeypatch.setattr(loading, "_MOST_FILES", 3)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"input": "a"}')
    assert len(load_dataset(str(tmp_path), split="train", probs=None, seed=0, max_samples=None)) == 3
    (tmp_path / "src").mkdir()
    with pytest.raises(DataError, match="more than 3 files and folders"):
        load_dataset(str(tmp_path), split="train", probs=None, seed=0, max_samples=None)
