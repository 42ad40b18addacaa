"""All rows of a dataset are used or counted, by one process or several, and found again."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rollgrad.adapters.chat.row_error import Reason
from rollgrad.adapters.data.examples import preparation
from rollgrad.adapters.data.examples.preparation import cache_key
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.preparer import PreparationSettings
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.application.settings.sections.examples import LongRows, TrainOn
from rollgrad.domain.errors import ConfigurationError, DataError
from tests.example_rows import CHAT, READING, opened, prepared, write
from tests.forked_spawns import forked_by
from tests.scripts import ScriptHost


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
