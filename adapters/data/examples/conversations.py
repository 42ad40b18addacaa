"""Conversations of a row: a row's texts and messages as a sample, and which of its messages are trained.

Does not own: in which columns a format has its messages (`formats`, `pairs`), what a message may be (`rows`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.rows import (
    Conversation,
    PlainText,
    broken,
    column_value,
    read_tools,
    read_weight,
    text_of,
    without_none,
)
from rollgrad.application.foreign import shown
from rollgrad.application.settings.sections.examples import TrainOn
from rollgrad.domain.episodes.messages import Message, with_system


def written(row: Mapping[str, Any], column: str) -> Any:
    """Returns a column's text or messages. A whole number becomes its text, as the answers of sums are in CSV and
    Parquet; of other numbers it is not known how they were written."""
    value = column_value(row, column)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def optional_text(row: Mapping[str, Any], column: str) -> str:
    """Returns a column's text; empty where the row has none."""
    return "" if row.get(column) is None else text_of(row[column], column)


def answered(
    row: Mapping[str, Any],
    before: Sequence[Message],
    prompt: str,
    completion: str,
    settings: ReadingSettings,
    columns: tuple[str, str],
) -> Conversation | PlainText:
    """Returns a prompt and a completion that are texts: as messages where there is a chat template, as in rollouts.

    Args:
        row: has the system message and the tools.
        before: messages before the prompt.
        prompt: the user's text.
        completion: the assistant's text, which is trained.
        settings: say whether there is a chat template.
        columns: names of the columns of prompt and completion, for errors.

    Raises:
        RowError: one of them is empty, or the row needs a chat template.
    """
    for text, column in ((prompt, columns[0]), (completion, columns[1])):
        if not text.strip():
            raise RowError(Reason.EMPTY, f"{column} is empty.")
    if settings.apply_chat_template:
        asked: list[Message] = [*before, {"role": "user", "content": prompt}]
        return conversation(row, [*asked, {"role": "assistant", "content": completion}], settings, context=len(asked))
    if before or optional_text(row, "system"):
        raise broken("The row has a history or a system message, which need the chat template.")
    template = settings.input_template
    text = prompt if template is None else template.replace("{}", prompt)
    return PlainText(prompt=text, completion=completion, whole=settings.train_on is TrainOn.ALL)


def conversation(
    row: Mapping[str, Any], messages: Sequence[Message], settings: ReadingSettings, *, context: int | None = None
) -> Conversation:
    """Returns a conversation, and what of it is trained.

    Args:
        row: has the tools, and the system message of a conversation without one (column `system`, or else that of the
            settings).
        messages: all messages of the conversation.
        settings: say which messages are trained.
        context: number of messages at the beginning that are a prompt; None where no messages are set apart.

    Raises:
        RowError: nothing in it is trained, or something in it cannot be read.
    """
    given, messages = len(messages), with_system(messages, optional_text(row, "system") or settings.system_prompt)
    if context is not None:
        context += len(messages) - given
    weights = _weights(messages, settings.train_on, context)
    whole = settings.train_on is TrainOn.ALL
    if whole and any(_differs_in_weight(message) for message in messages):
        raise broken(
            "A message says with train or weight that it is not trained as the others are, but --data.train_on all "
            "trains everything: leave these keys out, or set --data.train_on assistant."
        )
    for message, weight in zip(messages, weights, strict=True):
        if weight > 0 and not _says_something(message):
            raise RowError(Reason.EMPTY, "A reply that is to be trained is empty.")
    if not whole and not any(weights):
        raise RowError(Reason.UNTRAINED, "No reply in it is trained.")
    template_kwargs = _template_kwargs(row)
    return Conversation(
        messages=tuple({k: v for k, v in message.items() if k not in ("train", "weight")} for message in messages),
        weights=tuple(weights),
        tools=read_tools(row.get("tools")),
        template_kwargs=template_kwargs,
        whole=whole,
    )


def refuse_weights(*replies: Conversation | PlainText) -> None:
    """Raises if messages have weights that a comparison of whole replies cannot heed."""
    weights = {weight for reply in replies if isinstance(reply, Conversation) for weight in reply.weights}
    if not weights <= {0.0, 1.0}:
        raise broken(
            "A message has a weight other than 0 and 1: replies are compared whole; leave the weight out, or give the "
            "row one in the column weight."
        )


def _template_kwargs(row: Mapping[str, Any]) -> Any:
    """Returns the row's own arguments of the chat template."""
    given = row.get("chat_template_kwargs")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise broken(f"chat_template_kwargs holds text that is no JSON: {error}.") from error
    if given is not None and not isinstance(given, Mapping):
        raise broken(f"chat_template_kwargs is {shown(given)}: they are an object.")
    return without_none(given or {})


def _says_something(message: Message) -> bool:
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else content
    return bool(text or message.get("tool_calls") or message.get("reasoning_content"))


def _differs_in_weight(message: Message) -> bool:
    return message.get("weight", 1) != 1 or message.get("train", True) in (False, 0)


def _weights(messages: Sequence[Message], train_on: TrainOn, context: int | None) -> list[float]:
    """Returns the weight of each message in the loss: its own where it has one, else 1 if it is trained."""
    trained = _trained(messages, train_on, context)
    return [_weight(message, place in trained) for place, message in enumerate(messages)]


def _trained(messages: Sequence[Message], train_on: TrainOn, context: int | None) -> set[int]:
    """Returns the places of the messages that the settings train."""
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    match train_on:
        case TrainOn.LAST:
            return set(replies[-1:])
        case TrainOn.COMPLETION:
            asked = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
            return {place for place in replies if place >= (asked if context is None else context)}
        case _:
            return {place for place in replies if context is None or place >= context}


def _weight(message: Message, trained: bool) -> float:
    weight = 1.0 if trained else 0.0
    if message.get("weight") is not None:
        weight = read_weight(message["weight"], "The weight of a message")
    train = message.get("train")
    if train is not None and not isinstance(train, bool | int):
        raise broken(f"A message has train {shown(train)}: it is true or false.")
    if train is not None:
        weight = (weight or 1.0) if train else 0.0
    if weight and message["role"] != "assistant":
        raise broken(f"A message of the role {message['role']} has a weight: assistant messages alone are trained.")
    return weight
