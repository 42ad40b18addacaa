"""Rows with images become the tokens of a rollout, and their images are read again when an example is taken."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rollgrad.adapters.chat.image_files import opened
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.preparation import prepare_examples
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.sources import open_sources
from rollgrad.adapters.data.examples.streaming import stream_rows
from rollgrad.application.settings.sections.examples import ExampleFormat, LongRows, TrainOn
from rollgrad.domain.errors import DataError
from tests.example_runs import written
from tests.tiny_vision import codec_of, picture, tiny_vlm

RED, WIDE = picture((200, 0, 0)), picture((0, 150, 0), width=56, height=24)
READING = ReadingSettings(image_key="images")
MESSAGES = ExampleFormat.MESSAGES


def user(*parts: str) -> dict[str, Any]:
    texts = [{"type": "image"} if part == "IMAGE" else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": texts}


CHAT = [
    user("What is ", "IMAGE", "?"),
    {"role": "assistant", "content": "red"},
    user("IMAGE", "and?"),
    {"role": "assistant", "content": "green"},
]
ROW = {"messages": CHAT, "images": [RED, WIDE]}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "idefics3"])
def processor(request: pytest.FixtureRequest) -> Any:
    return tiny_vlm(request.param)[1]


def preparer(processor: Any, reading: ReadingSettings = READING, **settings: Any) -> Preparer:
    made = PreparationSettings(reading=reading, **settings)
    return Preparer(processor.tokenizer, made, ImageRenderer(processor))


@pytest.mark.parametrize("train_on", [TrainOn.ASSISTANT, TrainOn.LAST, TrainOn.ALL])
def test_tokens_and_images_are_those_of_a_rollout(processor: Any, train_on: TrainOn) -> None:
    (branch,) = preparer(processor, evolve(READING, train_on=train_on)).prepare(ROW, MESSAGES).branches
    files = iter([RED, WIDE])
    seen = [
        {**m, "content": [{"type": "image", "image": next(files)} if p["type"] == "image" else p for p in m["content"]]}
        if m["role"] == "user"
        else m
        for m in CHAT[:3]
    ]
    codec = codec_of(processor)
    rendered = codec.render(seen)
    length = len(rendered.token_ids)
    assert branch.token_ids[:length] == rendered.token_ids
    assert branch.images == rendered.images
    reply = codec.encode("green<|im_end|>")
    assert branch.token_ids[length : length + len(reply)] == tuple(reply)
    assert branch.weights[length : length + len(reply)] == (1.0,) * len(reply)
    of_images = {place for placed in branch.images for place in range(placed.start, placed.stop)}
    assert of_images
    assert not any(branch.weights[place] for place in of_images)
    if train_on is TrainOn.ALL:
        assert all(weight for place, weight in enumerate(branch.weights) if place and place not in of_images)
    else:
        trained = [token for token, weight in zip(branch.token_ids, branch.weights, strict=True) if weight]
        assert trained == [*(codec.encode("red<|im_end|>") if train_on is TrainOn.ASSISTANT else ()), *reply]


def test_marks_in_a_prompt_say_where_images_stand(processor: Any) -> None:
    row = {"prompt": "Is <image> like <image>?", "completion": "no", "images": [RED, WIDE]}
    (found,) = preparer(processor).prepare(row, ExampleFormat.COMPLETION).branches
    asked = user("Is ", "IMAGE", " like ", "IMAGE", "?")
    as_messages = {"messages": [asked, {"role": "assistant", "content": "no"}], "images": [RED, WIDE]}
    assert (found,) == preparer(processor).prepare(as_messages, MESSAGES).branches


def test_both_replies_of_a_pair_have_the_images_of_their_prompt(processor: Any) -> None:
    row = {"prompt": "What is it?", "chosen": "red", "rejected": "blue", "images": RED}
    pairs = evolve(READING, format=ExampleFormat.PAIRS)
    chosen, rejected = preparer(processor, pairs).prepare(row, ExampleFormat.PAIRS).branches
    assert chosen.images == rejected.images
    assert len(chosen.images) == 1


@pytest.mark.parametrize(
    ("row", "said", "reason"),
    [
        (
            {"messages": CHAT, "images": [RED]},
            "1 images, but its messages have 2 marks for images: write one mark for each image",
            Reason.BROKEN,
        ),
        ({"messages": CHAT, "images": [RED, "none.png"]}, "none.png cannot be read", Reason.IMAGE),
        ({"messages": CHAT, "images": [RED, b"no picture"]}, "An image cannot be read", Reason.IMAGE),
        ({"messages": CHAT, "images": [RED, "http://nowhere/a.png"]}, "in a network", Reason.IMAGE),
        ({"messages": CHAT}, "no column 'images'", Reason.BROKEN),
    ],
)
def test_a_row_with_other_images_than_marks_is_refused(
    processor: Any, row: dict[str, Any], said: str, reason: Reason
) -> None:
    with pytest.raises(RowError, match=said) as caught:
        preparer(processor).prepare(row, MESSAGES)
    assert caught.value.reason is reason


def test_images_are_never_cut(processor: Any) -> None:
    with pytest.raises(RowError, match="no image is cut"):
        preparer(processor, max_tokens=20, overlong=LongRows.CUT).prepare(ROW, MESSAGES)


def test_images_in_texts_are_refused(processor: Any) -> None:
    with pytest.raises(RowError, match="which stand in messages"):
        preparer(processor).prepare({"text": "Look!", "images": [RED]}, ExampleFormat.TEXT)
    with pytest.raises(RowError, match="A message of the row has an image, but text alone is trained"):
        preparer(processor, ReadingSettings()).prepare({"messages": CHAT}, MESSAGES)


def test_images_are_read_again_and_must_be_the_same(processor: Any, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    chat = [user("What is ", "IMAGE", "?"), {"role": "assistant", "content": "red"}]
    rows = [
        {"messages": chat, "images": [str(tmp_path / "red.png")]},
        {"messages": [user("2?"), chat[1]], "images": []},
    ]
    path = written(tmp_path / "rows.jsonl", rows)

    def prepared() -> Any:
        mixture = open_sources(str(path), split="train", probs=None, seed=0, max_samples=None, settings=READING)
        settings, renderer = PreparationSettings(reading=READING), ImageRenderer(processor)
        return prepare_examples(mixture, processor.tokenizer, settings, cache_dir=tmp_path, images=renderer)

    first = prepared()
    assert [len(branch.images) for example in (first[0], first[1]) for branch in example.branches] == [1, 0]
    (tmp_path / "red.png").write_bytes(picture((0, 0, 200)))
    with pytest.raises(DataError, match=r"rows.jsonl.*the files of its images have changed"):
        first[0]
    second = prepared()
    assert (second.fingerprint, second.origin) != (first.fingerprint, first.origin)  # nothing kept of the first is used


def test_a_broken_picture_of_a_table_is_a_row_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    rows: dict[str, Any] = {
        "prompt": ["What?", "And?"],
        "completion": ["red", "green"],
        "datasource": ["first", "second"],
        "images": [[{"bytes": data, "path": None}] for data in (RED, b"no picture")],
    }
    texts = {name: datasets.Value("string") for name in ("prompt", "completion", "datasource")}
    features = datasets.Features({**texts, "images": datasets.List(datasets.Image())})
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    mixture = open_sources(path, split="train", probs=None, seed=0, max_samples=None, settings=READING)
    source, number = mixture.source(1)
    with pytest.raises(RowError, match="cannot be decoded") as caught:
        source.rows[number]
    assert caught.value.reason is Reason.IMAGE
    assert mixture.datasources(["rows"]) == ["first", "second"]
    load = datasets.load_dataset

    def from_the_hub(name: str, configuration: str | None, **settings: Any) -> Any:
        return load("parquet", data_files=path, streaming=settings["streaming"])

    for name in (path, "owner/name"):
        if name != path:
            monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
        first, second = stream_rows(name, "train")
        assert callable(first.held), "what waits in a block is no decoded picture"
        assert not isinstance(first.content, RowError)
        assert first.content["images"][0].size == opened(RED).size
        assert isinstance(second.content, RowError)
        assert second.content.reason is Reason.IMAGE
