"""Formats of datasets: parses rows of each.

Invariant: what is trained is what the row and the settings say; a row that says something else raises `RowError`. Does
not own: which format a dataset has (`recognition`), what a message may be (`rows`), which messages are trained
(`conversations`), pairs (`pairs`), nor tokens (`preparation`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.datasets.columns import written_messages
from rollgrad.adapters.data.examples.conversations import answered, conversation, optional_text, refuse_weights, written
from rollgrad.adapters.data.examples.images import seen
from rollgrad.adapters.data.examples.pairs import read_pair
from rollgrad.adapters.data.examples.recognition import LABEL_COLUMN, REPLY_COLUMN, ReadingSettings, step_columns
from rollgrad.adapters.data.examples.rows import (
    Conversation,
    Labelled,
    PlainText,
    Pretokenised,
    Sample,
    Steps,
    broken,
    column_value,
    read_label,
    read_messages,
    read_sharegpt,
    read_weight,
    text_of,
)
from rollgrad.adapters.data.examples.steps import read_steps
from rollgrad.application.foreign import shown
from rollgrad.application.settings.sections.examples import ExampleFormat, TrainOn
from rollgrad.domain.episodes.messages import Message

MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that say which of `input_ids` are trained."""


def read_row(row: Mapping[str, Any], kind: ExampleFormat, settings: ReadingSettings) -> tuple[Sample, float]:
    """Returns the content of a row of format `kind`, and the row's weight in the loss (its column `weight`, or 1).

    Raises:
        RowError: it cannot be used.
    """
    weight = 1.0 if row.get("weight") is None else read_weight(row["weight"], "weight")
    try:
        return seen(READERS[kind](row, settings), row, settings.image_key, settings.fetched), weight
    except RecursionError as error:
        raise broken("A value of the row is nested too deeply.") from error


def _tokens(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    """Tokens and weights, without the places that `attention_mask` leaves out: they pad a batch."""
    given = _padded_tokens(row, settings)
    if row.get("attention_mask") is None:
        return given
    seen = _integers(row["attention_mask"], "attention_mask", booleans=True)
    if len(seen) != len(given.token_ids):
        raise broken(
            f"attention_mask has {len(seen)} values for {len(given.token_ids)} input_ids: each token needs one."
        )
    if not set(seen) <= {0, 1}:
        raise broken("attention_mask holds something that is neither 0 nor 1.")
    if not any(seen):
        raise RowError(Reason.EMPTY, "attention_mask leaves no token of input_ids.")
    kept = [place for place, value in enumerate(seen) if value]
    return Pretokenised(
        token_ids=tuple(given.token_ids[place] for place in kept), weights=tuple(given.weights[place] for place in kept)
    )


def _padded_tokens(row: Mapping[str, Any], settings: ReadingSettings) -> Pretokenised:
    token_ids = _integers(column_value(row, "input_ids"), "input_ids")
    if not token_ids:
        raise RowError(Reason.EMPTY, "input_ids has no tokens.")
    masks = [name for name in MASKS if row.get(name) is not None]
    if len(masks) > 1 and settings.train_on is not TrainOn.ALL:
        raise broken(f"The row has {' and '.join(masks)}, each of which says what is trained: keep one of them.")
    if not masks or settings.train_on is TrainOn.ALL:
        return Pretokenised(token_ids=token_ids, weights=(1.0,) * len(token_ids))
    name = masks[0]
    if name == "labels":
        weights = tuple(0.0 if label == -100 else 1.0 for label in _integers(row[name], name))
        other = [
            i for i, label in enumerate(row[name]) if label != -100 and label != token_ids[min(i, len(token_ids) - 1)]
        ]
        if other and len(weights) == len(token_ids):
            raise broken(
                f"labels differ from input_ids at place {other[0]}: labels are the tokens themselves, not shifted, "
                "or -100."
            )
    else:
        if isinstance(row[name], str) or not isinstance(row[name], Sequence):
            raise broken(f"{name} holds {shown(row[name])}, which is no list of numbers.")
        weights = tuple(read_weight(float(value) if isinstance(value, bool) else value, name) for value in row[name])
    if len(weights) != len(token_ids):
        raise broken(f"{name} has {len(weights)} values for {len(token_ids)} input_ids: each token needs one.")
    return Pretokenised(token_ids=token_ids, weights=weights)


def _replies(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    """A reply with its own tokens, as it was sampled: one that was cut off has no end."""
    if row.get("completion") is None:
        raise RowError(Reason.EMPTY, f"The reply could not be sampled: {row.get('failure') or 'completion is null'}")
    prompt, tokens = (_integers(column_value(row, name), name) for name in ("prompt_tokens", "tokens"))
    trained = 1.0 if settings.train_on is TrainOn.ALL else 0.0
    return Pretokenised(
        token_ids=(*prompt, *tokens),
        weights=(trained,) * len(prompt) + (1.0,) * len(tokens),
        reply=len(prompt),
        says=text_of(row["completion"], "completion"),
    )


def _integers(value: Any, column: str, *, booleans: bool = False) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise broken(f"{column} holds {shown(value)}, which is no list of numbers.")
    if any((isinstance(item, bool) and not booleans) or not isinstance(item, int) for item in value):
        raise broken(f"{column} holds something that is no whole number.")
    return tuple(value)


def _messages(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    column = settings.input_key or "messages"
    value = written_messages(column_value(row, column))
    if settings.input_key is not None and isinstance(value, str):
        raise broken(
            f"{column} holds a text, not messages: name the column of its reply with --data.output_key, or set "
            "--data.format text to train on the text itself."
        )
    return conversation(row, read_messages(value, column, settings.known_role), settings)


def _sharegpt(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    column = settings.input_key or "conversations"
    return conversation(row, read_sharegpt(column_value(row, column), column), settings)


def _text(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    column = settings.input_key or "text"
    text = text_of(column_value(row, column), column)
    if not text.strip():
        raise RowError(Reason.EMPTY, f"{column} is empty.")
    return PlainText(prompt="", completion=text, whole=True)


def _completion(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    keys = (settings.input_key or "prompt", settings.output_key or REPLY_COLUMN)
    prompt, completion = (written(row, key) for key in keys)
    if isinstance(prompt, str) and isinstance(completion, str):
        return answered(row, [], prompt, completion, settings, keys)
    if isinstance(prompt, str) and not isinstance(completion, str):
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    asked = read_messages(prompt, keys[0], settings.known_role)
    reply = read_messages(completion, keys[1], settings.known_role)
    return conversation(row, asked + reply, settings, context=len(asked))


def _alpaca(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    question = text_of(written(row, "instruction"), "instruction")
    more = optional_text(row, "input")
    if more.strip():
        question = f"{question}\n{more}"
    before: list[Message] = []
    turns = row.get("history") or ()
    for turn in turns if isinstance(turns, Sequence) else [turns]:
        if isinstance(turn, str) or not isinstance(turn, Sequence) or len(turn) != 2:
            raise broken(f"history holds {shown(turn)}: it is a list of pairs of question and answer.")
        before.append({"role": "user", "content": text_of(turn[0], "history")})
        before.append({"role": "assistant", "content": text_of(turn[1], "history")})
    answer = text_of(written(row, "output"), "output")
    return answered(row, before, question, answer, settings, ("instruction", "output"))


def _unpaired(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    label_key = settings.label_key or LABEL_COLUMN
    desirable = read_label(column_value(row, label_key), label_key)
    reply = _completion(row, settings)
    assert isinstance(reply, Conversation | PlainText)
    refuse_weights(reply)
    return Labelled(reply=reply, desirable=desirable)


def _steps(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    read = read_steps(row, settings)
    if read.prompt is None:
        solution: Conversation | PlainText = PlainText(prompt="", completion=read.text, whole=True)
    else:
        columns = step_columns(settings)
        names = (columns["prompt_key"], columns["steps_key"])
        solution = answered(row, [], read.prompt, read.text, settings, names)
    return Steps(solution=solution, ends=read.ends, labels=read.labels)


READERS: Mapping[ExampleFormat, Callable[[Mapping[str, Any], ReadingSettings], Sample]] = {
    ExampleFormat.TOKENS: _tokens,
    ExampleFormat.REPLIES: _replies,
    ExampleFormat.MESSAGES: _messages,
    ExampleFormat.SHAREGPT: _sharegpt,
    ExampleFormat.COMPLETION: _completion,
    ExampleFormat.ALPACA: _alpaca,
    ExampleFormat.TEXT: _text,
    ExampleFormat.PAIRS: read_pair,
    ExampleFormat.UNPAIRED: _unpaired,
    ExampleFormat.STEPS: _steps,
}
"""Functions that parse a row of each format."""
