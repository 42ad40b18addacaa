"""Formats of datasets: parses rows of each.

Invariant: what is trained is what the row and the settings say; a row that says something else raises `RowError`. Does
not own: which format a dataset has (`recognition`), what a message may be (`rows`), nor tokens (`preparation`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.datasets.columns import written_messages
from rollgrad.adapters.data.examples.images import seen
from rollgrad.adapters.data.examples.ranked import best_and_worst, ranked_column
from rollgrad.adapters.data.examples.recognition import LABEL_COLUMN, REPLY_COLUMN, ReadingSettings, step_columns
from rollgrad.adapters.data.examples.rows import (
    Conversation,
    Labelled,
    Pair,
    PlainText,
    Pretokenised,
    Sample,
    Steps,
    broken,
    column_value,
    read_label,
    read_messages,
    read_number,
    read_sharegpt,
    read_tools,
    read_weight,
    text_of,
    without_none,
)
from rollgrad.adapters.data.examples.steps import read_steps
from rollgrad.application.foreign import shown
from rollgrad.application.settings.sections.examples import ExampleFormat, TrainOn
from rollgrad.domain.episodes.messages import Message, with_system

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


def _said(row: Mapping[str, Any], column: str) -> Any:
    """A column's text or messages; a whole number is its text, as the answers of sums are in CSV and Parquet. Of other
    numbers it is not known how they were written."""
    value = column_value(row, column)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _optional_text(row: Mapping[str, Any], column: str) -> str:
    """A column's text; empty where the row has none."""
    return "" if row.get(column) is None else text_of(row[column], column)


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
    return _conversation(row, read_messages(value, column, settings.known_role), settings)


def _sharegpt(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    column = settings.input_key or "conversations"
    return _conversation(row, read_sharegpt(column_value(row, column), column), settings)


def _text(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    column = settings.input_key or "text"
    text = text_of(column_value(row, column), column)
    if not text.strip():
        raise RowError(Reason.EMPTY, f"{column} is empty.")
    return PlainText(prompt="", completion=text, whole=True)


def _completion(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    keys = (settings.input_key or "prompt", settings.output_key or REPLY_COLUMN)
    prompt, completion = (_said(row, key) for key in keys)
    if isinstance(prompt, str) and isinstance(completion, str):
        return _answered(row, [], prompt, completion, settings, keys)
    if isinstance(prompt, str) and not isinstance(completion, str):
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    asked = read_messages(prompt, keys[0], settings.known_role)
    answered = read_messages(completion, keys[1], settings.known_role)
    return _conversation(row, asked + answered, settings, context=len(asked))


def _alpaca(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    question = text_of(_said(row, "instruction"), "instruction")
    more = _optional_text(row, "input")
    if more.strip():
        question = f"{question}\n{more}"
    before: list[Message] = []
    turns = row.get("history") or ()
    for turn in turns if isinstance(turns, Sequence) else [turns]:
        if isinstance(turn, str) or not isinstance(turn, Sequence) or len(turn) != 2:
            raise broken(f"history holds {shown(turn)}: it is a list of pairs of question and answer.")
        before.append({"role": "user", "content": text_of(turn[0], "history")})
        before.append({"role": "assistant", "content": text_of(turn[1], "history")})
    answer = text_of(_said(row, "output"), "output")
    return _answered(row, before, question, answer, settings, ("instruction", "output"))


def _pair(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    """Prompt and replies are texts or messages; a reply that is messages and does not begin with the assistant's is a
    whole conversation, and its prompt counts. Without a prompt it is what both replies begin with. Of ranked replies
    the best and the worst are the pair."""
    keys = (settings.chosen_key or "chosen", settings.rejected_key or "rejected")
    ranked = None if settings.chosen_key or settings.rejected_key else ranked_column(row)
    if ranked is not None:
        row = best_and_worst(row, ranked)
    prompt_key = settings.input_key or ("prompt" if row.get("prompt") is not None else None)
    prompt = None if prompt_key is None else _said(row, prompt_key)
    chosen, rejected = (_said(row, key) for key in keys)
    margin = 0.0 if row.get("margin") is None else read_number(row["margin"], "margin")
    if all(isinstance(reply, str) for reply in (chosen, rejected)) and (prompt is None or isinstance(prompt, str)):
        return _pair_of_texts(row, prompt, (chosen, rejected), settings, keys, margin)
    asked: list[Message] = []
    if prompt is not None:
        as_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = read_messages(as_messages, prompt_key or "prompt", settings.known_role)
    replies = []
    for reply, key in zip((chosen, rejected), keys, strict=True):
        as_messages = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
        replies.append(read_messages(as_messages, key, settings.known_role))
    whole = [reply[0]["role"] != "assistant" for reply in replies]
    if all(whole):  # UltraFeedback has such a prompt beside its conversations
        shared = 0
        while shared < min(map(len, replies)) and replies[0][shared] == replies[1][shared]:
            shared += 1
        if shared == len(replies[0]) == len(replies[1]):
            raise RowError(Reason.EQUAL, "The chosen and the rejected reply are the same.")
        asked, replies = replies[0][:shared], [reply[shared:] for reply in replies]
    elif any(whole):
        raise broken(f"Of {keys[0]} and {keys[1]} one is a whole conversation, the other a reply.")
    if not all(replies) or not asked:
        raise broken("The two conversations have no prompt in common, or one of them no reply of its own.")
    first, second = (_conversation(row, [*asked, *reply], settings, context=len(asked)) for reply in replies)
    _refuse_weights(first, second)
    return Pair(chosen=first, rejected=second, margin=margin)


def _unpaired(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    label_key = settings.label_key or LABEL_COLUMN
    desirable = read_label(column_value(row, label_key), label_key)
    reply = _completion(row, settings)
    assert isinstance(reply, Conversation | PlainText)
    _refuse_weights(reply)
    return Labelled(reply=reply, desirable=desirable)


def _steps(row: Mapping[str, Any], settings: ReadingSettings) -> Sample:
    read = read_steps(row, settings)
    if read.prompt is None:
        solution: Conversation | PlainText = PlainText(prompt="", completion=read.text, whole=True)
    else:
        columns = step_columns(settings)
        names = (columns["prompt_key"], columns["steps_key"])
        solution = _answered(row, [], read.prompt, read.text, settings, names)
    return Steps(solution=solution, ends=read.ends, labels=read.labels)


def _refuse_weights(*replies: Conversation | PlainText) -> None:
    """Raises if messages have weights that a comparison of whole replies cannot heed."""
    weights = {weight for reply in replies if isinstance(reply, Conversation) for weight in reply.weights}
    if not weights <= {0.0, 1.0}:
        raise broken(
            "A message has a weight other than 0 and 1: replies are compared whole; leave the weight out, or give the "
            "row one in the column weight."
        )


def _pair_of_texts(
    row: Mapping[str, Any],
    prompt: str | None,
    replies: tuple[str, str],
    settings: ReadingSettings,
    keys: tuple[str, str],
    margin: float,
) -> Pair:
    if prompt is None:  # what both begin with, as in Anthropic's hh-rlhf; a template writes messages only
        if settings.system_prompt is not None or _optional_text(row, "system"):
            raise broken(
                f"{keys[0]} and {keys[1]} are texts without a prompt, which take no system message: leave out "
                "--data.system_prompt and the column system, or name the column of the prompt with --data.prompt_key."
            )
        texts = [PlainText(prompt="", completion=reply, whole=True) for reply in replies]
        if replies[0] == replies[1]:
            raise RowError(Reason.EQUAL, "The chosen and the rejected reply are the same.")
        return Pair(chosen=texts[0], rejected=texts[1], margin=margin)
    first, second = (
        _answered(row, [], prompt, reply, settings, ("prompt", key)) for reply, key in zip(replies, keys, strict=True)
    )
    return Pair(chosen=first, rejected=second, margin=margin)


def _answered(
    row: Mapping[str, Any],
    before: Sequence[Message],
    prompt: str,
    completion: str,
    settings: ReadingSettings,
    columns: tuple[str, str],
) -> Conversation | PlainText:
    """A prompt and a completion that are texts: messages where there is a chat template, as in rollouts."""
    for text, column in ((prompt, columns[0]), (completion, columns[1])):
        if not text.strip():
            raise RowError(Reason.EMPTY, f"{column} is empty.")
    if settings.apply_chat_template:
        asked: list[Message] = [*before, {"role": "user", "content": prompt}]
        return _conversation(row, [*asked, {"role": "assistant", "content": completion}], settings, context=len(asked))
    if before or _optional_text(row, "system"):
        raise broken("The row has a history or a system message, which need the chat template.")
    template = settings.input_template
    written = prompt if template is None else template.replace("{}", prompt)
    return PlainText(prompt=written, completion=completion, whole=settings.train_on is TrainOn.ALL)


def _conversation(
    row: Mapping[str, Any], messages: Sequence[Message], settings: ReadingSettings, *, context: int | None = None
) -> Conversation:
    """The conversation and what of it is trained; the first `context` messages are a prompt. One without a system
    message has that of the row's column `system`, or else of the settings."""
    own, messages = len(messages), with_system(messages, _optional_text(row, "system") or settings.system_prompt)
    if context is not None:
        context += len(messages) - own
    whole = settings.train_on is TrainOn.ALL
    weights = _weights(messages, settings.train_on, context)
    if whole and any(m.get("weight", 1) != 1 or m.get("train", True) in (False, 0) for m in messages):
        raise broken(
            "A message says with train or weight that it is not trained as the others are, but --data.train_on all "
            "trains everything: leave these keys out, or set --data.train_on assistant."
        )
    for message, weight in zip(messages, weights, strict=True):
        if weight > 0 and not _says(message):
            raise RowError(Reason.EMPTY, "A reply that is to be trained is empty.")
    if not whole and not any(weights):
        raise RowError(Reason.UNTRAINED, "No reply in it is trained.")
    given = row.get("chat_template_kwargs")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise broken(f"chat_template_kwargs holds text that is no JSON: {error}.") from error
    if given is not None and not isinstance(given, Mapping):
        raise broken(f"chat_template_kwargs is {shown(given)}: they are an object.")
    return Conversation(
        messages=tuple({k: v for k, v in message.items() if k not in ("train", "weight")} for message in messages),
        weights=tuple(weights),
        tools=read_tools(row.get("tools")),
        template_kwargs=without_none(given or {}),
        whole=whole,
    )


def _says(message: Message) -> bool:
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else content
    return bool(text or message.get("tool_calls") or message.get("reasoning_content"))


def _weights(messages: Sequence[Message], train_on: TrainOn, context: int | None) -> list[float]:
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    asked = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    match train_on:
        case TrainOn.LAST:
            trained = set(replies[-1:])
        case TrainOn.COMPLETION:
            trained = {place for place in replies if place >= (asked if context is None else context)}
        case _:
            trained = {place for place in replies if context is None or place >= context}
    weights = []
    for place, message in enumerate(messages):
        weight = 1.0 if place in trained else 0.0
        if message.get("weight") is not None:
            weight = read_weight(message["weight"], "The weight of a message")
        train = message.get("train")
        if train is not None and not isinstance(train, bool | int):
            raise broken(f"A message has train {shown(train)}: it is true or false.")
        if train is not None:
            weight = (weight or 1.0) if train else 0.0
        if weight and message["role"] != "assistant":
            raise broken(f"A message of the role {message['role']} has a weight: assistant messages alone are trained.")
        weights.append(weight)
    return weights


READERS: Mapping[ExampleFormat, Callable[[Mapping[str, Any], ReadingSettings], Sample]] = {
    ExampleFormat.TOKENS: _tokens,
    ExampleFormat.REPLIES: _replies,
    ExampleFormat.MESSAGES: _messages,
    ExampleFormat.SHAREGPT: _sharegpt,
    ExampleFormat.COMPLETION: _completion,
    ExampleFormat.ALPACA: _alpaca,
    ExampleFormat.TEXT: _text,
    ExampleFormat.PAIRS: _pair,
    ExampleFormat.UNPAIRED: _unpaired,
    ExampleFormat.STEPS: _steps,
}
"""Functions that parse a row of each format."""
