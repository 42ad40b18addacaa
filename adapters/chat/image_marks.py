"""Places of images in the messages of a row, as datasets of OpenRLHF, TRL and verl mark them.

Invariant: each image stands at one place, in the order of the row, or the row is refused. Does not own: reading images
(`pictures.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import DataError

MARK = "<image>"
"""Text that stands for the next image of a row."""


def listed_images(value: Any) -> list[Any]:
    """Returns the images of a column's value: None, one, or a list.

    >>> listed_images("a.png"), listed_images(None)
    (['a.png'], [])
    """
    if value is None or value == "":
        return []
    return [each for each in value if each is not None] if isinstance(value, list | tuple) else [value]


def placed_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Returns messages with an image in the place of each mark, or of each part of the type image that holds none;
    without any of them images come first in the first message of the user.

    >>> placed_images([{"role": "user", "content": "Count <image>!"}], ["a.png"])[0]["content"][1]
    {'type': 'image', 'image': 'a.png'}

    Raises:
        DataError: there are more marks than images, or fewer.
    """
    marks = sum(part is None for message in messages for part in _parts(message))
    if marks == 0 and images:
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise DataError("The row has images, but no message of the user that they could stand in: add one.")
        message = messages[first]
        content = message["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        return [
            *messages[:first],
            {**message, "content": [*map(_image, images), *texts]},
            *messages[first + 1 :],
        ]
    if marks != len(images):
        raise DataError(
            f"The row has {len(images)} images, but its messages have {marks} marks for images: write one mark for "
            "each image, or none, and they stand before the user's first text."
        )
    left = iter(images)
    return [
        {**message, "content": [_image(next(left)) if part is None else part for part in _parts(message)]}
        if any(part is None for part in _parts(message))
        else message
        for message in messages
    ]


def _image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def _parts(message: Message) -> Iterator[Any]:
    """Yields the parts of a message, None in the place of an image of the row."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and not any(part.get(name) for name in ("image", "path", "url", "base64")):
            yield None
        elif kind == "text" and message.get("role") != "assistant" and isinstance(part.get("text"), str):
            for index, piece in enumerate(str(part["text"]).split(MARK)):
                if index:
                    yield None
                if piece:
                    yield {**part, "text": piece}
        else:
            yield part
