"""Images of rows, put into their messages.

Does not own: the places of images in messages (`adapters/chat/image_marks.py`), nor what an image is.
"""

from collections.abc import Mapping, Sized
from typing import Any

from attrs import evolve

from rollgrad.adapters.chat.image_marks import listed_images, placed_images
from rollgrad.adapters.chat.pictures import has_images
from rollgrad.adapters.data.examples.rows import Conversation, Labelled, Pair, Sample, Steps, broken, column_value
from rollgrad.domain.errors import DataError

USUAL_COLUMNS = ("images", "image")
"""Columns with pictures, which texts alone cannot stand for."""


def seen(sample: Sample, row: Mapping[str, Any], key: str | None) -> Sample:
    """Returns the content of a row, with the images of its column `key` in the place of the marks in its messages; of a
    pair in both conversations. Without a `key` the row has no images.

    Raises:
        RowError: the row has images that are not read, or other marks than images.
    """
    if key is None:
        _refuse_images(sample, row)
        return sample
    images = listed_images(column_value(row, key))
    match sample:
        case Conversation():
            return _placed(sample, images)
        case Labelled(reply=Conversation() as reply):
            return evolve(sample, reply=_placed(reply, images))
        case Steps(solution=Conversation() as solution):
            return evolve(sample, solution=_placed(solution, images))
        case Pair(chosen=Conversation() as chosen, rejected=Conversation() as rejected):
            return evolve(sample, chosen=_placed(chosen, images), rejected=_placed(rejected, images))
    if images:
        raise broken(f"The row has images in {key}, which stand in messages: it needs messages, or a prompt.")
    return sample


def _placed(conversation: Conversation, images: list[Any]) -> Conversation:
    try:
        return evolve(conversation, messages=tuple(placed_images(conversation.messages, images)))
    except DataError as error:
        raise broken(str(error)) from error


def _refuse_images(sample: Sample, row: Mapping[str, Any]) -> None:
    for column in USUAL_COLUMNS:
        value = row.get(column)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise broken(
                f"The row has {column}, but text alone is trained: leave out such rows or the column, or set "
                "--data.image_key."
            )
    match sample:
        case Pair():
            parts: tuple[Any, ...] = (sample.chosen, sample.rejected)
        case Labelled():
            parts = (sample.reply,)
        case Steps():
            parts = (sample.solution,)
        case _:
            parts = (sample,)
    if any(has_images(message) for part in parts if isinstance(part, Conversation) for message in part.messages):
        raise broken(
            "A message of the row has an image, but text alone is trained: leave out such rows, or set "
            "--data.image_key."
        )
