"""Opening of an episode in an environment that makes its own task: the prompt's seed and conversation."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.prompts import Prompt

SEED_RANGE = 2**32
"""Bound of seeds: NumPy's global generator takes only smaller ones."""


def prompt_seed(prompt: Prompt) -> int:
    """Returns the seed of a prompt's episodes, at least 0 and below 2**32: all episodes of a group start alike.

    It is the first whole number among `seed` of the metadata, `seed` of the label, and the label. For other prompts it
    is computed from text and label.
    """
    label = prompt.label
    for candidate in (prompt.metadata.get("seed"), label.get("seed") if isinstance(label, Mapping) else label):
        seed = _whole_number(candidate)
        if seed is not None:
            return seed % SEED_RANGE
    digest = hashlib.sha256(repr((prompt.text, prompt.token_ids, label)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % SEED_RANGE


def user_message(text: str) -> list[Message]:
    """Returns an environment's text as the user's message; no message if the text is empty."""
    return [{"role": "user", "content": text}] if text else []


def conversation(prompt: Prompt) -> list[Message]:
    """Returns the prompt's messages; a prompt that is plain text counts as the user's message."""
    return [dict(message) for message in prompt.messages] or user_message(prompt.text)


def opening(prompt: Prompt, text: str) -> Sequence[Message]:
    """Returns the conversation of a prompt with an environment's first observation.

    It joins a last message that is the user's own text, because many templates refuse two messages of one role.
    """
    messages = conversation(prompt)
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if text and last.get("role") == "user" and isinstance(last.get("content"), str):
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, *user_message(text)]


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else None
