"""Columns that nobody named: found where they leave no doubt, refused by name where they do."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.columns import Columns, find_columns, value_at
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.errors import DataError

MESSAGES = [{"role": "user", "content": "3+4?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 0, "answer": "... #### 7", "question": "3+4?"},
}


def found(row: dict[str, Any], *, labels_are_read: bool = True, **named: str) -> tuple[str, str | None]:
    keys = {"input_key": None, "label_key": None, **named}
    columns = find_columns(row, "d", labels_are_read=labels_are_read, **keys)
    assert isinstance(columns, Columns)
    return columns.prompt, columns.label


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"input": "a", "label": "b"}, ("input", "label")),
        ({"question": "a", "answer": "#### 7"}, ("question", "answer")),
        ({"problem": "a", "solution": "b"}, ("problem", "solution")),
        ({"prompt": "a", "ground_truth": 7}, ("prompt", "ground_truth")),
        ({"prompt": MESSAGES, "solution": "b"}, ("prompt", "solution")),
        ({"prompt": MESSAGES, "problem": "a", "answer": "b"}, ("prompt", "answer")),
        (VERL, ("prompt", "reward_model.ground_truth")),
        (VERL | {"answer": "b"}, ("prompt", "reward_model.ground_truth")),
        ({"instruction": "a", "output": "b"}, ("instruction", None)),
        ({"Question": "a", " Answer": "b", "Id": 3}, ("Question", " Answer")),
        ({"PROMPT": "a", "input": "b", "Label": "c", "answer": "d"}, ("input", "answer")),
    ],
)
def test_columns_that_leave_no_doubt_are_taken(row: dict[str, Any], columns: tuple[str, str | None]) -> None:
    assert found(row) == columns


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "problem": "b"}, "columns question and problem, .*--data.input_key"),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            "columns input and instruction, .*--data.input_key .*Alpaca's rows, write both into one column",
        ),
        (
            {"prompt": "a", "answer": "b", "solution": "c", "label": "d"},
            "answer, solution and label, .*--data.label_key",
        ),
        (
            {"text": "a", "reward_model": {"style": "rule"}},
            r"--data.input_key to one of its.*\(reward_model.style, text",
        ),
    ],
)
def test_columns_that_leave_doubt_are_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        found(row)


def test_labels_that_nothing_reads_may_be_doubtful() -> None:
    assert found({"prompt": "a", "answer": "b", "solution": "c"}, labels_are_read=False) == ("prompt", None)


@pytest.mark.parametrize(("key", "value"), [("a.b", 1), ("a.c.d", 2), ("x.y", 3)])
def test_dots_lead_into_nested_columns(key: str, value: int) -> None:
    row = {"a": {"b": 1, "c": {"d": 2}}, "x.y": 3, "x": {"y": 4}}
    assert value_at(row, key) == value
    assert found({"p": row, "input": "q"}, label_key=f"p.{key}") == ("input", f"p.{key}") or key == "x.y"


@pytest.mark.parametrize("key", ["a.nothing", "a.b.c", "b"])
def test_a_nested_column_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(DataError, match=rf"no column '{key}': set --data.label_key .*\(a.b, input\)"):
        found({"a": {"b": 1}, "input": "q"}, label_key=key)


def test_what_was_found_is_said_once_and_prompts_are_built_from_it(tiny_tokenizer: Any) -> None:
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig())
    with capture_logs() as said:
        prompts = [builder.build(VERL, "gsm8k") for _ in range(3)]
    assert [line["event"] for line in said] == [
        "gsm8k: prompts from column prompt, labels from column reward_model.ground_truth"
    ]
    assert {(prompt.label, prompt.messages) for prompt in map(freeze, prompts)} == {("7", "3+4?")}
    with capture_logs() as said:
        PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(input_key="q", label_key="a")).build(
            {"q": "x", "a": 1}, "d"
        )
    assert said == []


@pytest.mark.parametrize(
    ("row", "key", "warned"),
    [
        (
            {"images": ["a.png"]},
            None,
            "d: the model is not shown the images of column images: set --data.image_key images",
        ),
        ({"images": None}, None, None),
        ({"images": ["a.png"]}, "images", None),
        ({}, None, None),
    ],
)
def test_images_that_are_not_shown_are_told(row: Any, key: str | None, warned: str | None, tiny_tokenizer: Any) -> None:
    with capture_logs() as said:
        PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(image_key=key)).found({"prompt": "a", **row}, "d")
    assert [line["event"] for line in said if line["log_level"] == "warning"] == ([warned] if warned else [])


def freeze(prompt: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(label=prompt.label, messages=prompt.messages[0]["content"])


def test_of_answer_and_solution_the_usual_one_is_said() -> None:
    row = {"problem": "1 + 1?", "solution": "One and one are two.", "answer": "2"}
    with pytest.raises(DataError, match=r"set --data\.label_key to one of them \(answer is usually the result"):
        find_columns(row, "d", input_key=None, label_key=None, labels_are_read=True)
    others = {"problem": "1 + 1?", "label": "2", "target": "2"}
    with pytest.raises(DataError, match=r"set --data\.label_key to one of them\.$"):
        find_columns(others, "d", input_key=None, label_key=None, labels_are_read=True)
