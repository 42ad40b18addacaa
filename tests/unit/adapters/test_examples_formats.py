"""Rows of each format become tokens and weights, and columns tell the format."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.formats import read_row
from rollgrad.adapters.data.examples.preparer import PreparationSettings, Preparer
from rollgrad.adapters.data.examples.recognition import ReadingSettings, find_format
from rollgrad.adapters.data.examples.report import DataReport
from rollgrad.adapters.data.examples.rows import Conversation, Pair, PlainText, Pretokenised
from rollgrad.application.settings.sections.examples import ExampleFormat, TrainOn
from rollgrad.domain.errors import DataError
from tests.example_rows import CHAT, PAIR, READING, ROWS, opened, prepared, write


@pytest.mark.parametrize("kind", [ExampleFormat.MESSAGES, ExampleFormat.SHAREGPT])
def test_messages_may_be_json_text(kind: ExampleFormat, tiny_tokenizer: Any) -> None:
    row = ROWS[kind]
    text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    assert text != row
    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    assert preparer.prepare(text, kind) == preparer.prepare(row, kind)


@pytest.mark.parametrize("kind", ROWS)
def test_each_format_is_known_by_its_columns_and_becomes_tokens(kind: ExampleFormat, tiny_tokenizer: Any) -> None:
    row = ROWS[kind]
    assert find_format([*row, "datasource", "id"], "set", READING) is kind
    made = Preparer(tiny_tokenizer, PreparationSettings()).prepare(row, kind)
    assert made.weight == 1.0
    (branch,) = made.branches
    assert branch.trained > 0
    assert branch.weights[0] == 0.0


def sampled(tokenizer: Any, text: str, **more: Any) -> dict[str, Any]:
    """A row as `rollgrad generate` writes it."""
    tokens = tokenizer.encode(text)
    row = {"prompt": "<user>7 + 3?", "messages": CHAT[:1], "completion": tokenizer.decode(tokens), "label": "10"}
    return {**row, "prompt_tokens": [1, 5, 6], "tokens": tokens, "stop_reason": "length", **more}


def test_sampled_replies_are_trained_as_they_were_sampled_also_beside_data_whose_columns_are_named(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """No template writes them again, one that was cut off does not end, and one that failed is counted."""
    good = sampled(tiny_tokenizer, "the sum is")
    failed = {**good, "completion": None, "tokens": [], "failure": "The engine is gone."}
    replies, named = tmp_path / "replies.jsonl", write(tmp_path / "named.jsonl", {"question": "a", "answer": "b"})
    write(replies, good, failed, sampled(tiny_tokenizer, "the sum is", completion="something else"))
    reading = ReadingSettings(input_key="question", output_key="answer")
    mixture = opened(f"{named},{replies}", reading)
    assert [part.kind for part in mixture.parts] == [ExampleFormat.COMPLETION, ExampleFormat.REPLIES]
    found = prepared(opened(replies), tiny_tokenizer)
    (branch,) = found[0].branches
    assert branch.token_ids_T.tolist() == [*good["prompt_tokens"], *good["tokens"]]
    assert branch.trained_length == len(good["tokens"])
    assert {reason: drop.count for reason, drop in found.report.dropped.items()} == {Reason.EMPTY: 1, Reason.BROKEN: 1}
    assert "The engine is gone." in found.report.dropped[Reason.EMPTY].example
    assert "a model with another tokenizer sampled it" in found.report.dropped[Reason.BROKEN].example
    whole = PreparationSettings(reading=evolve(READING, train_on=TrainOn.ALL))
    (branch,) = Preparer(tiny_tokenizer, whole).prepare(good, ExampleFormat.REPLIES).branches
    assert branch.weights == (0.0, *(1.0,) * (len(branch.token_ids) - 1))
    texts = ReadingSettings(input_key="messages", output_key="completion")  # whose own columns are there
    assert find_format(list(good), "set", texts) is ExampleFormat.COMPLETION


SAID: Mapping[ExampleFormat, Mapping[str, Any]] = {
    **{kind: row for kind, row in ROWS.items() if kind not in (ExampleFormat.TOKENS, ExampleFormat.TEXT)},
    ExampleFormat.PAIRS: PAIR,
    ExampleFormat.UNPAIRED: {"prompt": "What is 3 plus 4?", "completion": "seven", "label": True},
}
"""Rows of conversations."""


@pytest.mark.parametrize("kind", SAID)
def test_a_column_has_the_system_message_of_a_conversation_without_one(
    kind: ExampleFormat, tiny_tokenizer: Any
) -> None:
    """In every format; that of the settings is for rows that have none."""

    def written(row: Mapping[str, Any], **reading: Any) -> list[str]:
        settings = PreparationSettings(reading=evolve(READING, **reading))
        branches = Preparer(tiny_tokenizer, settings).prepare(row, kind).branches
        return [tiny_tokenizer.decode(branch.token_ids) for branch in branches]

    row = SAID[kind]
    told = written({**row, "system": "Be brief."}, system_prompt="Be long.")
    assert told == written(row, system_prompt="Be brief.")
    assert all(text.startswith("<|im_start|>system\nBe brief.<|im_end|>") for text in told)
    assert written({**row, "system": ""}) == written(row)
    if kind in (ExampleFormat.COMPLETION, ExampleFormat.ALPACA, ExampleFormat.PAIRS, ExampleFormat.UNPAIRED):
        with pytest.raises(RowError, match="need the chat template"):
            written({**row, "system": "Be brief."}, apply_chat_template=False)


def test_columns_that_nothing_is_read_from_are_told(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A row that cannot be read does not tell; columns that are nested, or that all formats have, are read."""
    rows = [
        {"messages": [], "id": 0, "empty": None},
        {"messages": CHAT, "system_prompt": "Be brief.", "tools": [], "weight": 1, "datasource": "a", "id": 1},
    ]
    report = prepared(opened(write(tmp_path / "a.jsonl", *rows)), tiny_tokenizer).report
    assert report.unread == ["id", "system_prompt"]
    assert ("columns not read", "id, system_prompt") in report.lines()
    assert DataReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    nested = evolve(READING, input_key="asked.text", output_key="said")
    row = {"asked": {"text": "a"}, "said": "b", "images": []}
    (source,) = opened(write(tmp_path / "b.jsonl", row), evolve(nested, image_key="images")).parts
    assert source.unread == ()
    assert opened(write(tmp_path / "c.jsonl", rows[0])).parts[0].unread == ()
    pairs = evolve(READING, format=ExampleFormat.PAIRS)
    labelled = [{"prompt": "a", "completion": text, "label": text == "b", "id": 1} for text in ("b", "c")]
    assert opened(write(tmp_path / "d.jsonl", *labelled), pairs).parts[0].unread == ("id",)
    assert opened(write(tmp_path / "e.jsonl", {**PAIR, "score_chosen": 1}), pairs).parts[0].unread == ("score_chosen",)


def test_whole_numbers_are_texts_where_texts_are_asked_for(tmp_path: Path) -> None:
    """As the answers to sums are in CSV; of 2.0 and True it is not known whether they were written as 2 and true."""
    (tmp_path / "sums.csv").write_text("question,answer\n3+4?,7\n")
    (source,) = opened(tmp_path / "sums.csv", named := evolve(READING, input_key="question", output_key="answer")).parts
    sample, _ = read_row(source.rows[0], ExampleFormat.COMPLETION, named)
    assert isinstance(sample, Conversation)
    assert sample.messages[-1]["content"] == "7"
    pair, _ = read_row({"prompt": 5, "chosen": 7, "rejected": 8}, ExampleFormat.PAIRS, READING)
    assert isinstance(pair, Pair)
    alpaca, _ = read_row({"instruction": 5, "output": 7}, ExampleFormat.ALPACA, READING)
    assert isinstance(alpaca, Conversation)
    assert alpaca.messages == pair.chosen.messages  # type: ignore[union-attr]
    for value in (2.0, True):
        with pytest.raises(RowError, match=f"completion holds {value}"):
            read_row({"prompt": "a", "completion": value}, ExampleFormat.COMPLETION, READING)


def test_texts_without_a_prompt_take_no_system_message() -> None:
    texts = {"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c", "system": "Be brief."}
    with pytest.raises(RowError, match=r"leave out --data\.system_prompt and the column system"):
        read_row(texts, ExampleFormat.PAIRS, READING)


def test_several_readings_are_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match=r"messages \(messages\) or as text \(text\): set --data.format"):
        find_format(["messages", "text"], "set", READING)
    assert find_format(["messages", "text"], "set", evolve(READING, format=ExampleFormat.TEXT)) is ExampleFormat.TEXT
    with pytest.raises(DataError, match=r"'set' has no column 'messages', which --data.format messages needs"):
        find_format(["text"], "set", evolve(READING, format=ExampleFormat.MESSAGES))


def test_data_of_other_trainers_and_unknown_columns_are_named() -> None:
    with pytest.raises(DataError, match="preference pairs"):
        find_format(["prompt", "chosen", "rejected"], "set", READING)
    with pytest.raises(DataError, match="question, response, of which no format can be told"):
        find_format(["question", "response"], "set", READING)
    keyed = evolve(READING, input_key="question", output_key="response")
    assert find_format(["question", "response"], "set", keyed) is ExampleFormat.COMPLETION
    sample, _ = read_row({"question": "q", "response": "r"}, ExampleFormat.COMPLETION, keyed)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q", "r"]


def test_labelled_completions_are_imitated_only_when_that_is_said() -> None:
    columns = ["prompt", "completion", "label"]
    for labels in ([True, False], [1, 0, 1], ["true", "False"], [1.0]):
        with pytest.raises(DataError, match=r"as prompt_completion .* or as good and bad completions .* --data.format"):
            find_format(columns, "set", READING, labels)
        said = evolve(READING, format=ExampleFormat.COMPLETION)
        assert find_format(columns, "set", said, labels) is ExampleFormat.COMPLETION
    for labels in ([], ["sports", "true"], [0, 2]):
        assert find_format(columns, "set", READING, labels) is ExampleFormat.COMPLETION


def test_labels_that_say_good_and_bad_are_not_imitated_unasked(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (None, True, False)]
    with pytest.raises(DataError, match="good and bad completions"):
        opened(write(tmp_path / "a.jsonl", *rows))


def test_a_named_prompt_has_its_completion() -> None:
    keyed = evolve(READING, input_key="question")
    assert find_format(["question", "completion"], "set", keyed) is ExampleFormat.COMPLETION
    sample, _ = read_row({"question": "q", "completion": "r"}, ExampleFormat.COMPLETION, keyed)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q", "r"]
    assert find_format(["question", "response"], "set", keyed) is ExampleFormat.MESSAGES
    with pytest.raises(RowError, match=r"question holds a text, not messages: .*--data.output_key.*--data.format text"):
        read_row({"question": "q", "response": "r"}, ExampleFormat.MESSAGES, keyed)
    sample, _ = read_row({"question": "q"}, ExampleFormat.TEXT, evolve(keyed, format=ExampleFormat.TEXT))
    assert sample == PlainText(prompt="", completion="q", whole=True)


def test_texts_become_messages_as_in_rollouts_or_stay_plain() -> None:
    row = ROWS[ExampleFormat.COMPLETION]
    sample, _ = read_row(row, ExampleFormat.COMPLETION, evolve(READING, system_prompt="Be brief."))
    assert isinstance(sample, Conversation)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant"]
    assert sample.weights == (0.0, 0.0, 1.0)
    plain = evolve(READING, apply_chat_template=False, input_template="Q: {} A:")
    sample, _ = read_row(row, ExampleFormat.COMPLETION, plain)
    assert sample == PlainText(prompt="Q: What is 3 plus 4? A:", completion="seven")


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (TrainOn.ASSISTANT, (0.0, 1.0, 0.0, 1.0, 1.0)),
        (TrainOn.LAST, (0.0, 0.0, 0.0, 0.0, 1.0)),
        (TrainOn.COMPLETION, (0.0, 0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_train_on_says_which_replies_are_trained(train_on: TrainOn, expected: tuple[float, ...]) -> None:
    messages = [*CHAT, *CHAT, {"role": "assistant", "content": "more"}]
    sample, _ = read_row({"messages": messages}, ExampleFormat.MESSAGES, evolve(READING, train_on=train_on))
    assert isinstance(sample, Conversation)
    assert sample.weights == expected


def test_weights_of_messages_win_over_train_on() -> None:
    messages = [*CHAT, CHAT[0], {**CHAT[1], "train": False}, CHAT[0], {**CHAT[1], "weight": 0.5}]
    sample, weight = read_row({"messages": messages, "weight": 2}, ExampleFormat.MESSAGES, READING)
    assert isinstance(sample, Conversation)
    assert sample.weights == (0.0, 1.0, 0.0, 0.0, 0.0, 0.5)
    assert weight == 2.0
    assert all(not {"train", "weight"} & message.keys() for message in sample.messages)


def test_what_arrow_fills_in_is_left_out_but_not_in_arguments_of_calls() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
    sample, _ = read_row({"messages": messages, "tools": tools}, ExampleFormat.MESSAGES, READING)
    assert isinstance(sample, Conversation)
    assert sample.messages[0] == {"role": "user", "content": "q"}
    assert sample.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": None}}
    assert sample.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_arguments_as_text_and_as_object_are_the_same_and_no_tools_are_none(tiny_tokenizer: Any) -> None:
    def row(arguments: Any, tools: Any) -> dict[str, Any]:
        call = {"name": "f", "arguments": arguments}
        return {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}], "tools": tools}

    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    tool = {"name": "f", "parameters": {}}
    first = preparer.prepare(row({"a": 1}, [tool]), ExampleFormat.MESSAGES)
    assert preparer.prepare(row('{"a": 1}', json.dumps([tool])), ExampleFormat.MESSAGES) == first
    none = preparer.prepare(row({"a": 1}, None), ExampleFormat.MESSAGES)
    assert preparer.prepare(row({"a": 1}, []), ExampleFormat.MESSAGES) == none != first


def test_sharegpt_calls_and_alpaca_history() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "seven"},
    ]
    sample, _ = read_row({"conversations": turns, "system": "s"}, ExampleFormat.SHAREGPT, READING)
    assert isinstance(sample, Conversation)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    row = {"instruction": "i", "input": "n", "output": "o", "history": [["q1", "a1"]]}
    sample, _ = read_row(row, ExampleFormat.ALPACA, READING)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == ["q1", "a1", "i\nn", "o"]
    assert sample.weights == (0.0, 0.0, 0.0, 1.0)


def test_pretokenised_rows_are_trained_as_given() -> None:
    for row, expected in (
        ({"input_ids": [5, 6, 7]}, (1.0, 1.0, 1.0)),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, (0.0, 0.0, 1.0)),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0.5, 1]}, (0.0, 0.5, 1.0)),
        ({"input_ids": [5, 6, 7], "assistant_masks": [False, True, True]}, (0.0, 1.0, 1.0)),
    ):
        sample, _ = read_row(row, ExampleFormat.TOKENS, READING)
        assert sample == Pretokenised(token_ids=(5, 6, 7), weights=expected)


def test_padding_is_left_out() -> None:
    for mask in ([0, 1, 1, 0], [False, True, True, False]):
        for more, expected in (({}, (1.0, 1.0)), ({"labels": [-100, -100, 6, -100]}, (0.0, 1.0))):
            row = {"input_ids": [9, 5, 6, 9], "attention_mask": mask, **more}
            sample, _ = read_row(row, ExampleFormat.TOKENS, READING)
            assert sample == Pretokenised(token_ids=(5, 6), weights=expected)


def test_parts_of_text_are_the_text(tiny_tokenizer: Any) -> None:
    def row(*parts: Any) -> dict[str, Any]:
        return {"messages": [CHAT[0], {"role": "assistant", "content": [*parts]}]}

    preparer = Preparer(tiny_tokenizer, PreparationSettings())
    parts = ({"type": "text", "text": "sev", "image": None}, {"text": "e"}, "n")
    assert preparer.prepare(row(*parts), ExampleFormat.MESSAGES) == preparer.prepare(
        {"messages": CHAT}, ExampleFormat.MESSAGES
    )
    for part, said in (
        ({"type": "image", "url": "a.png"}, "text alone"),
        ({"type": "text", "text": "a", "train": False}, "own train or weight"),
        (7, "text alone"),
    ):
        with pytest.raises(RowError, match=said) as caught:
            preparer.prepare(row(part), ExampleFormat.MESSAGES)
        assert caught.value.reason is Reason.BROKEN


@pytest.mark.parametrize("change", [{"train": False}, {"weight": 0.5}, {"weight": 0}])
def test_training_all_leaves_no_message_out(change: Mapping[str, Any]) -> None:
    reading = evolve(READING, train_on=TrainOn.ALL)
    with pytest.raises(RowError, match=r"--data\.train_on all trains everything") as caught:
        read_row({"messages": [*CHAT, CHAT[0], {**CHAT[1], **change}]}, ExampleFormat.MESSAGES, reading)
    assert caught.value.reason is Reason.BROKEN
    sample, _ = read_row({"messages": [CHAT[0], {**CHAT[1], "train": True}]}, ExampleFormat.MESSAGES, reading)
    assert isinstance(sample, Conversation)
    assert sample.whole


def test_the_error_of_a_template_is_told(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    preparer = Preparer(tokenizer_with("gemma3", tiny_tokenizer), PreparationSettings())
    with pytest.raises(RowError, match="roles must alternate") as caught:
        preparer.prepare(
            {"messages": [CHAT[0], {"role": "user", "content": "x" * 900}, CHAT[1]]}, ExampleFormat.MESSAGES
        )
    assert caught.value.reason is Reason.REFUSED


def test_replies_outside_of_generation_marks_are_not_the_templates_refusal(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% generation %}{% endgeneration %}{% endfor %}"
    )
    preparer = Preparer(tokenizer, PreparationSettings())
    with pytest.raises(RowError, match="No token of it is trained") as caught:
        preparer.prepare({"messages": CHAT}, ExampleFormat.MESSAGES)
    assert caught.value.reason is Reason.UNTRAINED


def test_templates_get_the_variables_of_the_row(tiny_tokenizer: Any) -> None:
    from tests.fakes.chat_templates import tokenizer_with

    tokenizer = tokenizer_with("qwen3", tiny_tokenizer)
    preparer = Preparer(tokenizer, PreparationSettings())
    row = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    (branch,) = preparer.prepare(row, ExampleFormat.MESSAGES).branches
    (thinking,) = preparer.prepare({"messages": CHAT}, ExampleFormat.MESSAGES).branches
    assert branch.token_ids == thinking.token_ids
    assert branch.trained < thinking.trained  # the generation prompt writes the empty thought, not the model
