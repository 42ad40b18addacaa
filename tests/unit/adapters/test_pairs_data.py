"""Rows with a chosen and a rejected reply become pairs of tokens that share their prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.examples.prepared import PreparedPairs
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings, find_format
from rollgrad.adapters.data.examples.sources import LOOKED_AT, Head, open_head
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.errors import DataError
from tests.example_rows import opened, prepared, write

READING = ReadingSettings(format=ExampleFormat.PAIRS)
ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]
SEVEN, EIGHT = ({"role": "assistant", "content": text} for text in ("seven", "eight"))

ROWS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "What is 3 plus 4?", "chosen": "seven", "rejected": "eight"},
    "prompt of messages": {"prompt": ASKED, "chosen": "seven", "rejected": [EIGHT]},
    "all messages": {"prompt": ASKED, "chosen": [SEVEN], "rejected": [EIGHT]},
    "conversations": {"chosen": [*ASKED, SEVEN], "rejected": [*ASKED, EIGHT]},
    "conversations beside a prompt": {
        "prompt": "What is 3 plus 4?",
        "chosen": [*ASKED, SEVEN],
        "rejected": [*ASKED, EIGHT],
    },
}
"""One pair, in each form."""


def pairs_of(path: Path, tokenizer: Any, *rows: Any, reading: ReadingSettings = READING, **more: Any) -> PreparedPairs:
    mixture = opened(write(path / "pairs.jsonl", *rows), reading)
    return PreparedPairs(prepared(mixture, tokenizer, path / "cache", reading=reading, **more))


def texts(pair: Preference, tokenizer: Any) -> tuple[str, str, str]:
    """The shared prompt, and what is trained of each reply."""
    prompt = tokenizer.decode(pair.chosen.token_ids_T[: pair.chosen.prompt_length])
    trained = (tokenizer.decode(reply.token_ids_T[reply.weights_T > 0]) for reply in (pair.chosen, pair.rejected))
    return (prompt, *trained)


@pytest.mark.parametrize("form", ROWS)
def test_every_form_of_a_pair_is_the_same_pair(form: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    (pair,) = (pairs_of(tmp_path, tiny_tokenizer, ROWS[form])[0],)
    prompt = TemplateCodec(tiny_tokenizer).render(ASKED).token_ids
    assert pair.chosen.token_ids_T[: pair.chosen.prompt_length].tolist() == list(prompt), "the prompt of a rollout"
    assert torch.equal(pair.rejected.token_ids_T[: len(prompt)], pair.chosen.token_ids_T[: len(prompt)])
    assert texts(pair, tiny_tokenizer)[1:] == ("seven<|im_end|>", "eight<|im_end|>")


def test_texts_without_a_prompt_share_what_both_begin_with(tmp_path: Path, tiny_tokenizer: Any) -> None:
    row = {"chosen": "\n\nHuman: Add.\n\nAssistant: seven", "rejected": "\n\nHuman: Add.\n\nAssistant: eight"}
    prompt, chosen, rejected = texts(pairs_of(tmp_path, tiny_tokenizer, row)[0], tiny_tokenizer)
    assert prompt.startswith("\n\nHuman: Add.\n\nAssistant:")
    assert prompt + chosen.removesuffix("<|im_end|>") == row["chosen"]
    assert prompt + rejected.removesuffix("<|im_end|>") == row["rejected"]


@pytest.mark.parametrize(
    ("begin", "chosen", "rejected", "trained"),
    [
        ("\n\nHuman: Add.\n\nAssistant: ", "the", "is", (" the", " is")),
        ("\n\nHuman: Add.\n\nAssistant: ", "I'm here", "I'll go", None),
        ("\n\nHuman: Add.\n\nAssistant: ", "Yes", "Yes, it is", None),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_the_token_that_decides_is_trained(
    begin: str,
    chosen: str,
    rejected: str,
    trained: tuple[str, str] | None,
    named: bool,
    tmp_path: Path,
    tiny_tokenizer: Any,
) -> None:
    row = {"prompt": begin, "chosen": chosen, "rejected": rejected}
    reading = evolve(READING, apply_chat_template=False)
    if not named:
        row = {"chosen": begin + chosen, "rejected": begin + rejected}
    pair = pairs_of(tmp_path, tiny_tokenizer, row, reading=reading)[0]
    prompt, *found = texts(pair, tiny_tokenizer)
    assert [prompt + text for text in found] == [begin + text + "<|im_end|>" for text in (chosen, rejected)]
    if trained is not None:
        assert found == [text + "<|im_end|>" for text in trained]
    if not named:
        first, second = (reply.token_ids_T[pair.chosen.prompt_length] for reply in (pair.chosen, pair.rejected))
        assert first != second, "nothing before the first difference is trained"


def test_only_what_follows_the_common_messages_is_trained(tmp_path: Path, tiny_tokenizer: Any) -> None:
    before = [*ASKED, SEVEN, {"role": "user", "content": "And more?"}]
    row = {"chosen": [*before, EIGHT], "rejected": [*before, SEVEN], "margin": 2, "weight": 0.5}
    pair = pairs_of(tmp_path, tiny_tokenizer, row)[0]
    assert texts(pair, tiny_tokenizer)[1:] == ("eight<|im_end|>", "seven<|im_end|>")
    assert (pair.margin, pair.weight, pair.row) == (2.0, 0.5, 0)
    batch = pack_preferences([pair])
    assert batch.prompt_lengths_S.tolist() == [pair.chosen.prompt_length] * 2


def test_columns_of_other_names(tmp_path: Path, tiny_tokenizer: Any) -> None:
    reading = evolve(READING, input_key="question", chosen_key="better", rejected_key="worse")
    row = {"question": "What is 3 plus 4?", "better": "seven", "worse": "eight"}
    pair = pairs_of(tmp_path, tiny_tokenizer, row, reading=reading)[0]
    assert texts(pair, tiny_tokenizer)[1:] == ("seven<|im_end|>", "eight<|im_end|>")
    with pytest.raises(DataError, match=r"no column 'chosen' and no column 'rejected'.*--data.chosen_key and"):
        find_format(list(row), "set", READING)
    with pytest.raises(DataError, match=r"set --data.prompt_key to one of its columns"):
        find_format(list(row), "set", evolve(reading, input_key="asked"))


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, Reason.EQUAL, "same"),
        ({"chosen": [*ASKED, SEVEN], "rejected": [*ASKED, SEVEN]}, Reason.EQUAL, "same"),
        ({"chosen": "same", "rejected": "same"}, Reason.EQUAL, "same"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, Reason.EMPTY, "chosen is empty"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, Reason.EMPTY, "prompt is empty"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, Reason.EMPTY, "chosen has no messages"),
        ({"prompt": "a", "rejected": "b"}, Reason.BROKEN, "no column 'chosen'"),
        ({"prompt": "a", "chosen": 3.5, "rejected": "b"}, Reason.BROKEN, "chosen holds 3"),
        ({"prompt": ASKED, "chosen": [], "rejected": [SEVEN]}, Reason.EMPTY, "chosen has no messages"),
        ({"prompt": 5.5, "chosen": "a", "rejected": "b"}, Reason.BROKEN, "prompt holds 5"),
        ({"chosen": [*ASKED, SEVEN], "rejected": [EIGHT]}, Reason.BROKEN, "one is a whole conversation"),
        ({"chosen": [*ASKED, SEVEN], "rejected": ASKED}, Reason.BROKEN, "no reply of its own"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, Reason.BROKEN, "margin"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("inf")}, Reason.BROKEN, "no number from"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e39}, Reason.BROKEN, "no number from"),
        ({"chosen": "One", "rejected": "2"}, Reason.BROKEN, "no prompt in common"),
        (
            {"prompt": ASKED, "chosen": [{**SEVEN, "weight": 0.5}], "rejected": [EIGHT]},
            Reason.BROKEN,
            "weight other than 0 and 1",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0}, Reason.UNTRAINED, "weight 0"),
    ],
)
def test_rows_that_are_no_pairs_have_a_reason(
    row: dict[str, Any], reason: Reason, said: str, tiny_tokenizer: Any
) -> None:
    preparer = Preparer(tiny_tokenizer, PreparationSettings(reading=READING))
    with pytest.raises(RowError, match=said) as refused:
        preparer.prepare(row, ExampleFormat.PAIRS)
    assert refused.value.reason is reason


def test_long_pairs_are_dropped_or_cut_but_never_to_equal_replies(tmp_path: Path, tiny_tokenizer: Any) -> None:
    long = {"prompt": "a", "chosen": "b " * 40 + "x", "rejected": "b " * 40 + "y"}
    for overlong, reason in ((LongRows.DROP, Reason.OVERLONG), (LongRows.CUT, Reason.EQUAL)):
        path = tmp_path / overlong
        path.mkdir()
        kept = pairs_of(path, tiny_tokenizer, ROWS["texts"], long, max_tokens=40, overlong=overlong)
        assert len(kept) == 1
        assert set(kept.examples.report.dropped) == {reason}
    differing = {"prompt": "a", "chosen": "b " * 40, "rejected": "c " * 40}
    path = tmp_path / "differing"
    path.mkdir()
    kept = pairs_of(path, tiny_tokenizer, differing, max_tokens=40, overlong=LongRows.CUT)
    assert [len(reply) for reply in (kept[0].chosen, kept[0].rejected)] == [40, 40]
    assert texts(kept[0], tiny_tokenizer)[1].startswith("b b")


def test_margins_may_be_negative(tmp_path: Path, tiny_tokenizer: Any) -> None:
    assert pairs_of(tmp_path, tiny_tokenizer, {**ROWS["texts"], "margin": -0.5})[0].margin == -0.5


def test_texts_without_a_prompt_take_no_system_message(tiny_tokenizer: Any) -> None:
    reading = evolve(READING, system_prompt="Be brief.")
    preparer = Preparer(tiny_tokenizer, PreparationSettings(reading=reading))
    with pytest.raises(RowError, match=r"take no system message: leave out --data\.system_prompt"):
        preparer.prepare({"chosen": "Add: seven", "rejected": "Add: eight"}, ExampleFormat.PAIRS)
    assert preparer.prepare(ROWS["texts"], ExampleFormat.PAIRS).branches


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (False, [("seven", "six"), ("7", "nine"), ("9", "8")]),
        (True, [("seven", "six"), ("seven", "nine"), ("7", "six"), ("7", "nine"), ("9", "8"), ("10", "8")]),
    ],
)
def test_good_and_bad_replies_to_a_prompt_are_pairs(
    every: bool, expected: list[tuple[str, str]], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    def row(prompt: Any, completion: Any, label: Any) -> dict[str, Any]:
        return {"prompt": prompt, "completion": completion, "label": label}

    rows = [
        row("What is 3 plus 4?", "seven", True),
        row(ASKED, [{"role": "assistant", "content": "9"}], 1),
        row("What is 3 plus 4?", "six", False),
        row("Nobody answers this well.", "No.", False),
        row("What is 3 plus 4?", "7", "true"),
        row(ASKED, [{"role": "assistant", "content": "8"}], 0),
        row("What is 3 plus 4?", "nine", "false"),
        row(ASKED, [{"role": "assistant", "content": "10"}], 1),
        row("What is 3 plus 4?", "five", 5),
        {"prompt": "What is 3 plus 4?", "label": True},
    ]
    pairs = pairs_of(tmp_path, tiny_tokenizer, *rows, reading=evolve(READING, all_pairs=every))
    found = [texts(pairs[index], tiny_tokenizer)[1:] for index in range(len(pairs))]
    assert sorted(found) == sorted((f"{good}<|im_end|>", f"{bad}<|im_end|>") for good, bad in expected)
    dropped = {reason: (drop.count, drop.place) for reason, drop in pairs.examples.report.dropped.items()}
    source = tmp_path / "pairs.jsonl"
    if every:
        assert dropped["no_other_reply"] == (1, f"{source}:4")
    else:
        assert dropped["no_other_reply"] == (3, f"{source}:4")
    assert dropped["broken"][1] in (f"{source}:9", f"{source}:10")


LABELLED = {"completion": "seven", "label": True}
RANKED = {"answers": [{"answer": "seven", "rank": 1}, {"answer": "eight", "rank": 1}]}


@pytest.mark.parametrize(
    ("alone", "last", "reason"),
    [
        (LABELLED, [LABELLED, {"completion": "six", "label": False}], "no_other_reply"),
        (RANKED, [{"answers": [*RANKED["answers"], {"answer": "six", "rank": 2}]}], "equal_ranks"),
    ],
    ids=["labelled", "ranked"],
)
def test_first_rows_that_make_no_pair_say_all_the_same_what_rows_are(
    alone: dict[str, Any], last: list[dict[str, Any]], reason: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    reading = evolve(READING, all_pairs=True)
    first = [{"prompt": f"Question {number}?", **alone} for number in range(LOOKED_AT)]
    none = pairs_of(tmp_path, tiny_tokenizer, *first, reading=reading)
    with pytest.raises(DataError, match=rf"^No row of data\.dataset can be used: {reason}: {LOOKED_AT} \("):
        none.examples.report.check(1.0, "data.dataset")
    pairs = pairs_of(tmp_path, tiny_tokenizer, *first, *({"prompt": "Which?", **row} for row in last), reading=reading)
    assert texts(pairs[0], tiny_tokenizer)[1:] == ("seven<|im_end|>", "six<|im_end|>")


def test_replies_about_other_images_or_tools_or_to_another_system_message_are_no_pair(tmp_path: Path) -> None:
    def row(completion: str, label: bool, image: str, tool: str) -> dict[str, Any]:
        about = {"images": [image], "tools": [{"type": "function", "function": {"name": tool}}]}
        return {"prompt": "What is it?", "completion": completion, "label": label, **about}

    rows = [
        row("a cat", True, "cat.png", "look"),
        row("a dog", False, "dog.png", "look"),
        row("a bird", False, "cat.png", "listen"),
        {**row("a cow", False, "cat.png", "look"), "system": "Be brief."},
        row("a fish", False, "cat.png", "look"),
    ]
    (source,) = opened(write(tmp_path / "rows.jsonl", *rows), evolve(READING, image_key="images")).parts
    pair, *alone = range(len(source.rows))
    assert (source.rows[pair]["chosen"], source.rows[pair]["rejected"]) == ("a cat", "a fish")
    assert len(alone) == 3
    for index in alone:
        with pytest.raises(RowError, match="No good reply"):
            source.rows[index]


def test_streamed_replies_are_joined_to_no_pairs() -> None:
    row = {"prompt": "What is it?", "completion": "a cat", "label": True}
    with pytest.raises(DataError, match=r"when all are read: leave --data\.stream out"):
        open_head("rows.jsonl", Head(["rows.jsonl:1"], [row]), READING)
