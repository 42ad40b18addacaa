"""Texts of messages as lists of parts, for templates that read nothing else.

Templates of some models that see images (SmolVLM, LLaVA-OneVision) go through the parts of a message, and write nothing
of a text, whose characters they take for parts. Does not own: the choice of messages.
"""

from collections.abc import Sequence
from typing import Any

from rollgrad.adapters.chat.special_text import unused_character
from rollgrad.domain.episodes.messages import Message


def reads_parts_alone(tokenizer: Any) -> bool:
    """Returns whether a tokenizer's chat template writes the text of a message only where it is in a part."""
    mark = unused_character([])

    def writes(content: Any) -> bool:
        try:
            return mark in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # templates raise whatever they like about content that they do not take
            return False

    return not writes(mark) and writes([{"type": "text", "text": mark}])


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with each text as the only part of its content.

    >>> in_parts([{"role": "user", "content": "Hi"}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}]
    """
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
