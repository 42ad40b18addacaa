"""Every row is looked at before the first step: what cannot be used is told by its number, what is too long is dropped
and counted, or refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.datasets.survey import BATCH
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.adapters.rewards.verifiers import label_problem
from rollgrad.application.settings.sections.data import DataConfig, Overlong
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import DataError

Make = Callable[..., DatasetPromptSource]


@pytest.fixture
def make(tiny_tokenizer: Any) -> Make:
    """A source of plain texts, a token a letter of `z`."""

    def source(texts: list[Any], *, seed: int = 0, **data: Any) -> DatasetPromptSource:
        builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(apply_chat_template=False, **data))
        return DatasetPromptSource([{"input": text} for text in texts], builder, seed=seed)

    return source


TEXTS = ["z" * (1 + index % 7) + str(index) for index in range(40)]
FITTING = [text for text in TEXTS if text.count("z") <= 4]
LIMIT = 4 + 2  # the letters, and two digits


@pytest.mark.parametrize("limit", [{"max_prompt_tokens": LIMIT}, {"max_len": LIMIT + 1}])
def test_prompts_that_are_too_long_are_dropped_counted_and_said_once(make: Make, limit: dict[str, int]) -> None:
    with capture_logs() as said:
        limit = {key: 4 + value - LIMIT for key, value in limit.items()}
        source = make(["z" * 9, "z" * 3, "z" * 4, "z" * 5], **limit)
    (warning,) = [line for line in said if line["log_level"] == "warning"]
    assert (warning["dropped"], warning["of"], warning["longest"], warning["limit"]) == (2, 4, 9, 4)
    assert warning["flag"] == f"--data.{next(iter(limit))}"
    assert len(source) == 2
    assert [prompt.text for prompt in source.prompts()] == ["z" * 3, "z" * 4]
    assert sorted(prompt.text for prompt in source.take(4)) == ["z" * 3] * 2 + ["z" * 4] * 2


def test_a_log_says_how_far_a_long_survey_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgrad.adapters.data.datasets.survey.BATCH", 2)
    monkeypatch.setattr("rollgrad.adapters.data.passing.SECONDS_BETWEEN", 0)
    with capture_logs() as said:
        make(["z"] * 5)
    assert [(line["done"], line["of"]) for line in said if line["event"].startswith("measuring 5 ")] == [
        (0, 5),
        (2, 5),
        (4, 5),
    ]


def test_an_epoch_holds_each_prompt_that_fits_once(make: Make) -> None:
    source = make(TEXTS, max_prompt_tokens=LIMIT, seed=3)
    kept = sorted(prompt.text for prompt in source.prompts())
    assert 0 < len(kept) < len(TEXTS)
    assert [sorted(p.text for p in source.take(len(source))) for _ in range(3)] == [kept] * 3


def test_a_restored_position_continues_among_dropped_rows(make: Make) -> None:
    """At every position, also where the next rows of the epoch are all dropped."""
    whole = [prompt.text for prompt in make(TEXTS, max_prompt_tokens=LIMIT).take(90)]
    for done in range(0, 90, 7):
        first, second = make(TEXTS, max_prompt_tokens=LIMIT), make(TEXTS, max_prompt_tokens=LIMIT)
        first.take(done)
        second.load_state_dict(first.state_dict())
        assert [prompt.text for prompt in second.take(90 - done)] == whole[done:]


def test_a_position_saved_before_there_was_a_limit_goes_on_alike(make: Make) -> None:
    """The state of old checkpoints is that of a cursor over all rows."""
    drawn, cursor = PromptCursor(5).take(13, len(TEXTS))
    source = make(TEXTS, seed=5)
    assert [prompt.text for prompt in source.take(13)] == [TEXTS[index] for index in drawn]
    assert source.state_dict() == cursor.state_dict() == {"seed": 5, "epoch": 0, "index": 13}
    rest, _ = cursor.take(60, len(TEXTS))
    limited = make(TEXTS, seed=0, max_prompt_tokens=LIMIT)
    limited.load_state_dict(cursor.state_dict())
    expected = [TEXTS[index] for index in rest if len(TEXTS[index]) <= LIMIT]
    assert [prompt.text for prompt in limited.take(len(expected))] == expected


@pytest.mark.parametrize(
    ("texts", "data", "words"),
    [
        (["z", "zzz"], {"overlong": Overlong.ERROR}, r"1 of the 2 .*\(row 2 is the first.*--data.overlong drop"),
        (["zzzz", "zzz"], {}, r"2 of the 2 .* row 1 the longest with 4\): raise --data.max_prompt_tokens"),
    ],
)
def test_too_long_prompts_are_refused_where_they_may_not_be_dropped(
    make: Make, texts: list[str], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make(texts, max_prompt_tokens=2, **data)


@pytest.mark.parametrize("place", [0, 1, BATCH, BATCH + 1, 2 * BATCH])
@pytest.mark.parametrize(("value", "words"), [("", "empty"), (None, "holds None"), (["x"], "holds")])
def test_a_row_that_cannot_be_used_is_found_at_once_by_its_number(
    make: Make, place: int, value: Any, words: str
) -> None:
    texts: list[Any] = ["z"] * (2 * BATCH + 1)
    texts[place] = value
    with pytest.raises(DataError, match=rf"Row {place + 1} of data.prompt_dataset cannot be used: .*{words}"):
        make(texts)


@pytest.mark.parametrize("place", [0, 3])
def test_a_row_that_cannot_even_be_read_is_found_by_its_number(tiny_tokenizer: Any, place: int) -> None:
    """A dataset with a column of pictures decodes them when a row is read."""

    class Decoded(list[dict[str, str]]):
        def __getitem__(self, index: Any) -> Any:
            if index == place:
                raise OSError("cannot identify image file")
            return super().__getitem__(index)

    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(apply_chat_template=False))
    with pytest.raises(DataError, match=rf"Row {place + 1} of .*cannot identify image file"):
        DatasetPromptSource(Decoded([{"input": "z"}] * 5), builder, seed=0)


def test_prompts_that_end_with_a_reply_are_told(tiny_tokenizer: Any) -> None:
    """Rows of fine-tuning hold the answer, which a prompt must not show."""
    question, answer = {"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}
    rows = [{"input": messages} for messages in ([question], [question, answer], [question, answer, question])]
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig())
    with capture_logs() as said:
        DatasetPromptSource(rows, builder, seed=0)
        DatasetPromptSource(rows[::2], builder, seed=0)
    (warning,) = [line["event"] for line in said if line["log_level"] == "warning"]
    assert warning.startswith("1 of 3 prompts of data.prompt_dataset end with an assistant's message")


def test_the_number_of_broken_rows_is_told(make: Make) -> None:
    with pytest.raises(DataError, match=r"Row 2 .*3 of 5 rows cannot be used: 2, 4, 5\. Mend them or leave them out"):
        make(["z", "", "z", None, ""])
    with pytest.raises(DataError, match=r"30 of 31 rows cannot be used: 2, 3, 4, .* 20, 21 \.\.\.\. Mend"):
        make(["z", *[""] * 30])


@pytest.mark.parametrize("kind", [Verifier.LAST_NUMBER, Verifier.EXACT_MATCH, Verifier.MATH])
@pytest.mark.parametrize(
    ("label", "words"),
    [
        (None, "--data.label_key"),
        ({"ground_truth": "7", "style": "rule"}, r"of ground_truth, style,.*--data.label_key answer.ground_truth"),
        ({"value": 7}, r"--data.label_key answer.value"),
        (["7", "8"], "list .*--data.label_key"),
    ],
)
def test_labels_that_a_verifier_cannot_compare_with_are_found_at_once(
    tiny_tokenizer: Any, kind: Verifier, label: Any, words: str
) -> None:
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(), label_problem=partial(label_problem, kind))
    rows = [{"question": "3+4?", "answer": "7"}, {"question": "2+2?", "answer": label}]
    with pytest.raises(DataError, match=rf"Row 2 .*--reward.verifier {kind} .*{words}|Row 2 .*{words}"):
        DatasetPromptSource(rows, builder, seed=0)


def test_a_verifier_without_any_label_names_the_flag(tiny_tokenizer: Any) -> None:
    check = partial(label_problem, Verifier.MATH)
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(), label_problem=check)
    with pytest.raises(
        DataError, match=r"verifier math compares with a label, and there is none: set --data.label_key"
    ):
        DatasetPromptSource([{"prompt": "3+4?"}], builder, seed=0)


def test_lengths_are_those_of_the_prompts(tiny_tokenizer: Any) -> None:
    """Measured in batches, also where messages spell out special tokens."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{'x' * index} <|im_end|> {index}" if index % 3 else f"{index}"} for index in range(20)
    ]
    rows[4] = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    source = DatasetPromptSource(rows, PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig()), seed=0)
    assert list(source.survey.lengths) == [len(prompt.token_ids) for prompt in source.prompts()]


def test_generated_tasks_are_measured_too(tiny_tokenizer: Any) -> None:
    spec = "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=6"
    plain = ReasoningGymPromptSource(spec, TemplateCodec(tiny_tokenizer), DataConfig(), size=30, seed=0)
    limit = sorted(plain.survey.lengths)[15]
    source = ReasoningGymPromptSource(
        spec, TemplateCodec(tiny_tokenizer), DataConfig(max_prompt_tokens=limit), size=30, seed=0
    )
    assert 0 < len(source) < 30
    assert all(len(prompt.token_ids) <= limit for prompt in source.take(60))


FINGERPRINT = """
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.survey import survey
from rollgrad.application.settings.sections.data import DataConfig
from tests.tiny_models import make_tiny_tokenizer

class Picture:
    pass

builder = PromptBuilder(TemplateCodec(make_tiny_tokenizer()), DataConfig(apply_chat_template=False))
row = {"input": "a", "seen": set(map(str, range(20))), "image": Picture(), "datasource": name}
print(survey([row], 1, builder, setting="s").fingerprint)
"""


def test_rows_have_one_fingerprint_in_every_process_and_under_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns may hold objects without a text of their own, and sets, whose order each process draws."""
    other = subprocess.run(
        [sys.executable, "-c", f"name = 'other'\n{FINGERPRINT}"],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[-1]
    exec(FINGERPRINT, {"__name__": "__main__", "name": "own"})
    assert capsys.readouterr().out.split()[-1] == other


def test_other_rows_or_another_order_have_another_fingerprint(make: Make) -> None:
    texts = [["a", "b"], ["b", "a"], ["a", "c"], ["a"], ["a", "b", "c"], ["ab"]]
    assert len({make(list(rows)).survey.fingerprint for rows in texts}) == len(texts)
    assert make(["a", "b"], seed=1).survey.fingerprint == make(["a", "b"]).survey.fingerprint
