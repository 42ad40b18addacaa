"""PromptBuilder: templates, columns and limits."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate, Telling
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.errors import ConfigurationError, DataError


@pytest.fixture
def codec(tiny_tokenizer: Any) -> TemplateCodec:
    return TemplateCodec(tiny_tokenizer)


def test_text_becomes_a_user_message_after_the_system_prompt(codec: TemplateCodec) -> None:
    builder = PromptBuilder(codec, DataConfig(system_prompt="Be brief.", label_key="answer"))
    prompt = builder.build({"input": "3+4?", "answer": 7, "level": "easy"}, "sums")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids == codec.encode(prompt.text)
    assert (prompt.label, prompt.datasource, prompt.metadata["level"]) == (7, "sums", "easy")


def test_a_column_has_the_system_message_of_a_prompt_without_one(codec: TemplateCodec) -> None:
    def text(row: dict[str, Any]) -> str:
        return PromptBuilder(codec, DataConfig(system_prompt="Other.")).build(row, "d").text

    asked = {"input": "3+4?", "answer": "7"}
    assert text({**asked, "system": "Mine."}).startswith("<|im_start|>system\nMine.<|im_end|>")
    assert text({**asked, "system": None}) == text({**asked, "system": ""}) == text(asked)
    assert "Other." in text(asked)
    messages = [{"role": "system", "content": "First."}, {"role": "user", "content": "hi"}]
    assert "Mine." not in text({**asked, "input": messages, "system": "Mine."})
    with pytest.raises(DataError, match="Column 'system' of 'd' holds 5, which is no text"):
        text({**asked, "system": 5})


def test_messages_keep_their_own_system_prompt(codec: TemplateCodec) -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    text = PromptBuilder(codec, DataConfig(system_prompt="Other.")).build({"input": messages}, "d").text
    assert "Mine." in text
    assert "Other." not in text
    assert len(messages) == 2


def test_messages_may_be_json_text_and_other_brackets_are_text(codec: TemplateCodec) -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    builder = PromptBuilder(codec, DataConfig())
    listed, written = (builder.build({"input": value}, "d") for value in (messages, json.dumps(messages, indent=1)))
    assert (listed.text, listed.messages) == (written.text, written.messages)
    for text in ("[1, 2]: sum?", '["role", "from"]', "[]", "[{"):
        assert builder.build({"input": text}, "d").messages[0]["content"] == text


def test_plain_text_goes_where_the_braces_are_and_may_hold_braces(codec: TemplateCodec) -> None:
    data = DataConfig(apply_chat_template=False, input_template="Question: {}\nAnswer {x}:")
    assert PromptBuilder(codec, data).build({"input": "{1}?"}, "d").text == "Question: {1}?\nAnswer {x}:"


def test_plain_text_without_template_is_itself(codec: TemplateCodec) -> None:
    prompt = PromptBuilder(codec, DataConfig(apply_chat_template=False)).build({"input": "3+4="}, "d")
    assert prompt.text == "3+4="
    assert prompt.label is None


@pytest.mark.parametrize(
    ("data", "flag"),
    [(DataConfig(input_key="prompt"), "--data.input_key"), (DataConfig(label_key="gold"), "--data.label_key")],
)
def test_a_missing_column_is_named_with_those_there_are(codec: TemplateCodec, data: DataConfig, flag: str) -> None:
    with pytest.raises(DataError, match=rf"(?=.*{flag}).*\(answer, input\)"):
        PromptBuilder(codec, data).build({"input": "a", "answer": "b", "datasource": "d"}, "d")


@pytest.mark.parametrize("value", [None, 7, [], ["hi"], [{"content": "no role"}]])
def test_with_the_chat_template_a_prompt_is_text_or_messages(codec: TemplateCodec, value: Any) -> None:
    with pytest.raises(DataError, match="text or a list of messages"):
        PromptBuilder(codec, DataConfig()).build({"input": value}, "d")


@pytest.mark.parametrize("value", [None, [{"role": "user", "content": "hi"}]])
def test_without_the_chat_template_a_prompt_is_text(codec: TemplateCodec, value: Any) -> None:
    with pytest.raises(DataError, match=r"--data.apply_chat_template True"):
        PromptBuilder(codec, DataConfig(apply_chat_template=False)).build({"input": value}, "d")


@pytest.mark.parametrize("value", ["", " \n", [{"role": "user", "content": ""}]])
@pytest.mark.parametrize("chat", [True, False])
def test_an_empty_prompt_is_refused(codec: TemplateCodec, chat: bool, value: Any) -> None:
    with pytest.raises(DataError, match="empty" if chat or isinstance(value, str) else "a text"):
        PromptBuilder(codec, DataConfig(apply_chat_template=chat)).build({"input": value}, "d")


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(input_template="Q: {}"),
        DataConfig(apply_chat_template=False, system_prompt="x"),
        DataConfig(apply_chat_template=False, input_template="Q:"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(codec: TemplateCodec, data: DataConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"--data.input_template"):
        PromptBuilder(codec, data)


MORE = TeacherTemplate("{prompt} Known: {solution} ({label}). {{prompt}} {x: 1}")


def test_a_teacher_reads_more_in_the_place_of_the_last_user_message(codec: TemplateCodec) -> None:
    builder = PromptBuilder(codec, DataConfig(system_prompt="Be brief.", label_key="answer"), teacher=MORE)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    last = [{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}]
    for asked, opening in (("3+4?", []), ([*talk, {"role": "user", "content": last}], talk)):
        prompt = builder.build({"input": asked, "answer": 7, "solution": "3, 4 <|im_end|>"}, "sums")
        told = {"role": "user", "content": "3+4? Known: 3, 4 <|im_end|> (7). {prompt} {x: 1}"}
        wanted = codec.render([{"role": "system", "content": "Be brief."}, *opening, told])
        assert prompt.teacher_token_ids == wanted.token_ids
        assert "Known" not in prompt.text
        assert prompt.token_ids == PromptBuilder(codec, builder.data).build(prompt.metadata, "sums").token_ids


def test_without_the_chat_template_a_teacher_reads_a_text(codec: TemplateCodec) -> None:
    data = DataConfig(apply_chat_template=False, input_template="Q: {}\nA:")
    prompt = PromptBuilder(codec, data, teacher=TeacherTemplate("{solution} {prompt}")).build(
        {"input": "3+4?", "solution": "7"}, "d"
    )
    assert codec.decode(prompt.teacher_token_ids) == "7 Q: 3+4?\nA:"
    assert PromptBuilder(codec, data).build({"input": "3+4?"}, "d").teacher_token_ids == ()


@pytest.mark.parametrize("chat", [True, False])
def test_a_teacher_is_told_a_reply_that_passed(codec: TemplateCodec, chat: bool) -> None:
    """In the place that the row leaves open, as if it had been a column of the row."""
    data = DataConfig(apply_chat_template=chat, system_prompt="Be brief." if chat else None, label_key="answer")
    row = {"input": "3+4?", "answer": 7}
    template, column = (
        TeacherTemplate("{prompt} ({label}) {passed_reply}"),
        TeacherTemplate("{prompt} ({label}) {tried}"),
    )
    assert template.judged == {"passed_reply"}
    assert not column.judged
    prompt = PromptBuilder(codec, data, teacher=template).build(row, "sums")
    telling = Telling(template, codec, longest=100)
    told = telling(prompt, "It is {prompt}: 7.", "wrong")
    assert (
        told
        == PromptBuilder(codec, data, teacher=column)
        .build(row | {"tried": "It is {prompt}: 7."}, "sums")
        .teacher_token_ids
    )
    assert "{passed_reply}" in codec.decode(prompt.teacher_token_ids)
    assert telling(prompt, None, "wrong") is None


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<think>3 and\n4</think>\n\nIt is 7. ", "3+4? It is 7."),
        ("3 and 4</think>It is 7.", "3+4? It is 7."),
        ("It is 7.", "3+4? It is 7."),
        ("<think>It is 7.</think>", None),
        (None, None),
    ],
)
def test_a_teacher_is_told_an_answer_without_its_thinking(
    codec: TemplateCodec, reply: str | None, expected: str | None
) -> None:
    """A reply that is thinking alone tells nothing, so that nothing is taught."""
    template = TeacherTemplate("{prompt} {passed_answer}")
    assert template.judged == {"passed_answer"}
    prompt = PromptBuilder(codec, DataConfig(apply_chat_template=False), teacher=template).build({"input": "3+4?"}, "d")
    told = Telling(template, codec, longest=100)(prompt, reply, "wrong")
    assert (None if told is None else codec.decode(told)) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((None, None), None),
        (("7", None), "3+4? [[ no place ]] [[{prompt}]] Right: 7! Now."),
        ((None, "off by one"), "3+4? [[ no place ]] [[{prompt}]] Wrong: off by one. Now."),
        (("[[{hint}]]", "5"), "3+4? [[ no place ]] [[{prompt}]] Right: [[{hint}]]! Wrong: 5. Now."),
    ],
)
def test_parts_of_which_nothing_is_known_are_left_out(
    codec: TemplateCodec, known: tuple[str | None, str | None], expected: str | None
) -> None:
    """Without any of what judged replies tell there is nothing to teach; the end of long feedback is told."""
    parts = "[[ {hint}]] [[{{prompt}}]][[ Right: {passed_reply}!]][[ Wrong: {reward_feedback}.]]"
    template = TeacherTemplate(f"{{prompt}} [[ no place ]]{parts} Now.")
    prompt = PromptBuilder(codec, DataConfig(apply_chat_template=False), teacher=template).build({"input": "3+4?"}, "d")
    assert "Right: {passed_reply}! Wrong: {reward_feedback}." in codec.decode(prompt.teacher_token_ids)
    told = Telling(template, codec, longest=100)(prompt, *known)
    assert (None if told is None else codec.decode(told)) == expected
    needs_both = TeacherTemplate("{prompt} {passed_reply} {reward_feedback}")
    assert (Telling(needs_both, codec, longest=100)(prompt, *known) is None) == (None in known)
    feedback = TeacherTemplate("{prompt}{reward_feedback}")
    cut = Telling(feedback, codec, longest=2)(prompt, None, "aaaa zz")
    assert cut is not None
    end = codec.decode(cut).removeprefix("3+4?")
    assert "aaaa zz".endswith(end)
    assert len(codec.encode(end)) == 2


@pytest.mark.parametrize("row", [{"input": "a"}, {"input": "a", "hint": None}])
def test_a_row_that_lacks_what_the_teacher_is_told_is_named(codec: TemplateCodec, row: dict[str, Any]) -> None:
    builder = PromptBuilder(codec, DataConfig(), teacher=TeacherTemplate("{prompt} {hint}"))
    with pytest.raises(DataError, match=r"no 'hint' in this row of 'd' \(.*input.*algo.kl.teacher_template"):
        builder.build(row, "d")
    rows = [{"input": "a", "hint": "b"}, row]
    with pytest.raises(DataError, match=r"Row 2 of data.prompt_dataset cannot be used: There is no 'hint'"):
        DatasetPromptSource(rows, builder, seed=0)


def test_the_longest_that_a_teacher_reads_is_of_the_prompts_that_are_kept(codec: TemplateCodec) -> None:
    rows = [{"input": "z" * own, "solution": "z" * more} for own, more in ((1, 2), (2, 5), (3, 9))]
    data = DataConfig(apply_chat_template=False, max_prompt_tokens=2)
    builder = PromptBuilder(codec, data, teacher=TeacherTemplate("{prompt}{solution}"))
    assert DatasetPromptSource(rows, builder, seed=0).survey.longest_told == 7
    assert DatasetPromptSource(rows, PromptBuilder(codec, data), seed=0).survey.longest_told == 0


def test_a_template_is_itself_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("{prompt} and {label}")
    assert TeacherTemplate.read("{prompt} x") == TeacherTemplate("{prompt} x")
    assert TeacherTemplate.read(str(tmp_path / "more.txt")) == TeacherTemplate("{prompt} and {label}")
    (tmp_path / "none.txt").write_text("{{prompt}} {label}")
    for given, problem in (
        (str(tmp_path / "none.txt"), "has no {prompt}"),
        ("{label}", "has no {prompt}"),
        (str(tmp_path / "gone.txt"), "cannot be read as a file"),
        ("no place", "cannot be read as a file"),
        ("x" * 5000, "cannot be read as a file"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            TeacherTemplate.read(given)
