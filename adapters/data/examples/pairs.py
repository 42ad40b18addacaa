"""Rows with a chosen and a rejected reply, parsed.

Prompt and replies are texts or messages. A row without a prompt has it at the beginning of both replies. Of ranked
replies the best and the worst are the pair.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.conversations import answered, conversation, optional_text, refuse_weights, written
from rollgrad.adapters.data.examples.ranked import best_and_worst, ranked_column
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.rows import Pair, PlainText, broken, read_messages, read_number
from rollgrad.domain.episodes.messages import Message


def read_pair(row: Mapping[str, Any], settings: ReadingSettings) -> Pair:
    """Returns the pair of a row.

    Raises:
        RowError: it has none.
    """
    keys = (settings.chosen_key or "chosen", settings.rejected_key or "rejected")
    ranked = None if settings.chosen_key or settings.rejected_key else ranked_column(row)
    if ranked is not None:
        row = best_and_worst(row, ranked)
    prompt_key = settings.input_key or ("prompt" if row.get("prompt") is not None else None)
    prompt = None if prompt_key is None else written(row, prompt_key)
    replies = (written(row, keys[0]), written(row, keys[1]))
    margin = 0.0 if row.get("margin") is None else read_number(row["margin"], "margin")
    if all(isinstance(reply, str) for reply in replies):
        if prompt is None:
            return _texts_without_prompt(row, replies, settings, keys, margin)
        if isinstance(prompt, str):
            return _texts(row, prompt, replies, settings, keys, margin)
    asked = [] if prompt is None else _messages(prompt, "user", prompt_key or "prompt", settings)
    conversations = [_messages(reply, "assistant", key, settings) for reply, key in zip(replies, keys, strict=True)]
    asked, answers = _prompt_apart(asked, conversations, keys)
    chosen, rejected = (conversation(row, [*asked, *answer], settings, context=len(asked)) for answer in answers)
    refuse_weights(chosen, rejected)
    return Pair(chosen=chosen, rejected=rejected, margin=margin)


def _texts_without_prompt(
    row: Mapping[str, Any], replies: tuple[str, str], settings: ReadingSettings, keys: tuple[str, str], margin: float
) -> Pair:
    """Returns two texts whose prompt is what both begin with, as in Anthropic's hh-rlhf."""
    if settings.system_prompt is not None or optional_text(row, "system"):  # a template writes messages only
        raise broken(
            f"{keys[0]} and {keys[1]} are texts without a prompt, which take no system message: leave out "
            "--data.system_prompt and the column system, or name the column of the prompt with --data.prompt_key."
        )
    if replies[0] == replies[1]:
        raise _same_reply()
    chosen, rejected = (PlainText(prompt="", completion=reply, whole=True) for reply in replies)
    return Pair(chosen=chosen, rejected=rejected, margin=margin)


def _texts(
    row: Mapping[str, Any],
    prompt: str,
    replies: tuple[str, str],
    settings: ReadingSettings,
    keys: tuple[str, str],
    margin: float,
) -> Pair:
    chosen, rejected = (
        answered(row, [], prompt, reply, settings, ("prompt", key)) for reply, key in zip(replies, keys, strict=True)
    )
    return Pair(chosen=chosen, rejected=rejected, margin=margin)


def _messages(value: Any, role: str, column: str, settings: ReadingSettings) -> list[Message]:
    """Returns a column's messages; a text is one message of the role."""
    as_messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return read_messages(as_messages, column, settings.known_role)


def _prompt_apart(
    asked: list[Message], replies: list[list[Message]], keys: tuple[str, str]
) -> tuple[list[Message], list[list[Message]]]:
    """Returns the messages of the prompt, and those of each reply after it. Replies that do not begin with the
    assistant are whole conversations: their prompt is what both begin with, whatever the row's prompt is, which
    UltraFeedback has beside its conversations."""
    whole = [reply[0]["role"] != "assistant" for reply in replies]
    if all(whole):
        shared = _shared_messages(*replies)
        if shared == len(replies[0]) == len(replies[1]):
            raise _same_reply()
        asked, replies = replies[0][:shared], [reply[shared:] for reply in replies]
    elif any(whole):
        raise broken(f"Of {keys[0]} and {keys[1]} one is a whole conversation, the other a reply.")
    if not all(replies) or not asked:
        raise broken("The two conversations have no prompt in common, or one of them no reply of its own.")
    return asked, replies


def _shared_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Returns the number of messages that both conversations begin with."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


def _same_reply() -> RowError:
    return RowError(Reason.EQUAL, "The chosen and the rejected reply are the same.")
