"""Keeps what only all rows of a dataset tell of the pairs that they make, beside the prepared data."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import structlog

from rollgrad.adapters.checkpoints.files import replace_file

log = structlog.get_logger(__name__)

VERSION = 3
"""Raised when the same rows become other arrays."""


def kept_index(directory: Path | None, find: Callable[[], Any], *depends_on: object) -> Any:
    """Returns the array that `find` makes, or that it made of the same before.

    Args:
        directory: where arrays are kept; None keeps none.
        find: reads all rows.
        depends_on: all that the array depends on, as texts tell it.
    """
    if directory is None:
        return find()
    key = hashlib.sha256(repr((VERSION, *depends_on)).encode()).hexdigest()[:32]
    place = directory / f"{key}.npy"
    if place.is_file():
        try:
            return numpy.load(place)
        except (OSError, ValueError, EOFError) as error:
            log.warning("the kept index of pairs is damaged, and made again", place=str(place), reason=str(error))
    array, content = find(), io.BytesIO()
    numpy.save(content, array)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(place, content.getvalue())
    except OSError as error:
        log.warning("the index of pairs is not kept", place=str(place), reason=str(error))
    return array
