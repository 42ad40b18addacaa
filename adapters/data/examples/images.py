"""Images of rows, put into their messages.

Does not own: the places of images in messages (`adapters/chat/image_marks.py`), nor what an image is.
"""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from attrs import evolve

from rollgrad.adapters.chat.image_marks import listed_images, placed_images
from rollgrad.adapters.chat.pictures import has_images
from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.rows import (
    Conversation,
    Labelled,
    Pair,
    Pretokenised,
    Sample,
    Steps,
    broken,
    column_value,
)
from rollgrad.adapters.data.fetched_images import FetchedImages
from rollgrad.application.foreign import shown
from rollgrad.domain.errors import DataError, ImageError

USUAL_COLUMNS = ("images", "image")
"""Columns with pictures, which texts alone cannot stand for."""


PLACES = "image_places"
"""Column with the places of images among the tokens of `input_ids`."""


def seen(sample: Sample, row: Mapping[str, Any], key: str | None, fetched: FetchedImages | None = None) -> Sample:
    """Returns the content of a row, with the images of its column `key` in the place of the marks in its messages; of a
    pair in both conversations. Without a `key` the row has no images. `fetched` fetches those that are URLs.

    Raises:
        RowError: the row has images that are not read, or other marks than images.
    """
    if key is None:
        _refuse_images(sample, row)
        return sample
    images = listed_images(column_value(row, key))

    def placed(conversation: Conversation) -> Conversation:
        return _placed(conversation, images, fetched)

    match sample:
        case Conversation():
            return placed(sample)
        case Pretokenised() if images:
            sources = images if fetched is None else map(fetched.source, images)
            return evolve(sample, images=tuple(sources), places=_places(row, len(images)))
        case Labelled(reply=Conversation() as reply):
            return evolve(sample, reply=placed(reply))
        case Steps(solution=Conversation() as solution):
            return evolve(sample, solution=placed(solution))
        case Pair(chosen=Conversation() as chosen, rejected=Conversation() as rejected):
            return evolve(sample, chosen=placed(chosen), rejected=placed(rejected))
    if images:
        raise broken(f"The row has images in {key}, which stand in messages: it needs messages, or a prompt.")
    return sample


def _places(row: Mapping[str, Any], images: int) -> tuple[tuple[int, int], ...]:
    """Returns the places of the images of a row that is tokens."""
    if row.get("attention_mask") is not None:
        raise broken(f"{PLACES} are among all of input_ids, of which attention_mask leaves some out: give one of them.")
    places = column_value(row, PLACES)
    if not isinstance(places, Sequence) or len(places) != images:
        raise broken(f"The row has {images} images, and {PLACES} {shown(places)}: each image needs one.")
    found = []
    for place in places:
        if not isinstance(place, Sequence) or len(place) != 2 or not all(isinstance(token, int) for token in place):
            raise broken(f"{PLACES} holds {shown(place)}: a place is the first token and the one behind the last.")
        found.append((place[0], place[1]))
    return tuple(found)


def _placed(conversation: Conversation, images: list[Any], fetched: FetchedImages | None) -> Conversation:
    try:
        messages = placed_images(conversation.messages, images)
        return evolve(conversation, messages=tuple(messages if fetched is None else fetched.local(messages)))
    except ImageError as error:
        raise RowError(Reason.IMAGE, str(error)) from error
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
