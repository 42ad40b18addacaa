"""Files of images: reading them, checking them, and writing others.

Invariants: an image that cannot be read is an `ImageError` that says which; nothing is fetched from a network. Does not
own: images in messages (`pictures.py`).
"""

import base64
import binascii
import io
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgrad.application.foreign import foreign_code, shown
from rollgrad.domain.errors import ImageError

MOST_BYTES = 64 * 2**20
"""Largest file of an image. Pillow itself refuses images of more than about 180 million pixels."""

MOST_PIXELS = 2 * 89_478_485
"""Pixels that the images of one request may have together: as many as Pillow allows one, which are half a gigabyte."""

LEAST_PIXELS = 2**16
"""Pixels that an image counts as at least: a model's processor takes milliseconds for the smallest."""

PROGRAM = "EPS"
"""Format that Pillow has another program, Ghostscript, run; a file from the network may be anything."""

ALIKE = ("JPEG", "PNG", "WEBP")
"""Formats that all readers of images know, and read alike where they have three colors and nothing else."""


def opened(data: bytes) -> Any:
    """Returns the Pillow image, upright and in RGB, of a file's bytes.

    Raises:
        ImageError: they are no image, or a broken one.
    """
    import PIL.Image
    import PIL.ImageOps

    with foreign_code(_unreadable), PIL.Image.open(io.BytesIO(data)) as picture:
        if picture.format == PROGRAM:
            raise ValueError("it is a program in PostScript, which is not run")
        return PIL.ImageOps.exif_transpose(picture).convert("RGB")


def check_pixels(sources: Sequence[Any]) -> None:
    """Checks that images have no more than `MOST_PIXELS` together, by the beginnings of their files alone: a file of a
    few kilobytes may have millions. Sources are those of `image_bytes`.

    Raises:
        ImageError: they have more, or one cannot be read.
    """
    pixels = 0
    for source in sources:
        data = _read(source)
        with foreign_code(_unreadable):
            pixels += max(LEAST_PIXELS, _pixels(data))
        if pixels > MOST_PIXELS:
            raise ImageError(
                f"The images of a request have more than {MOST_PIXELS:,} pixels together, each of them counted as "
                f"{LEAST_PIXELS:,} at least: send smaller ones, or fewer."
            )


def _pixels(data: bytes) -> int:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(data)) as picture:
        return int(picture.width * picture.height)


def image_bytes(source: Any) -> bytes:
    """Returns the bytes of an image's file, whose content is checked.

    Args:
        source: bytes, a path, a data URI, a Pillow image, or a mapping with `bytes` or `path`, as datasets have it.

    Raises:
        ImageError: there is no such file, it is too large, or no image.
    """
    data = _read(source)
    _check_size(data)
    opened(data)
    return data


def _check_size(data: bytes) -> None:
    if len(data) > MOST_BYTES:
        raise ImageError(f"An image of {len(data) / 2**20:.0f} MiB is too large: {MOST_BYTES // 2**20} MiB at most.")


def portable(data: bytes) -> bytes:
    """Returns a file whose pixels every reader finds as `opened` does, who may fill transparent ones otherwise: the
    image's own, or a PNG.

    Raises:
        ImageError: the PNG is too large.
    """
    import PIL.Image

    with foreign_code(_unreadable), PIL.Image.open(io.BytesIO(data)) as picture:
        if picture.format in ALIKE and picture.mode == "RGB":
            return data
    written = png(opened(data))
    _check_size(written)
    return written


def is_picture(value: Any) -> bool:
    """Returns whether a value is an image of Pillow, which need not be imported for it."""
    return hasattr(value, "save") and hasattr(value, "convert")


def png(picture: Any) -> bytes:
    """Returns the PNG file of an image of Pillow.

    Raises:
        ImageError: its own file is broken.
    """
    written = io.BytesIO()
    with foreign_code(_unreadable):
        picture.convert("RGB").save(written, format="PNG")
    return written.getvalue()


def blank() -> bytes:
    """Returns the file of a small image, for trials."""
    import PIL.Image

    return png(PIL.Image.new("RGB", (48, 32)))


def _unreadable(words: str) -> ImageError:
    return ImageError(f"An image cannot be read: {words}")


def _read(source: Any) -> bytes:
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if is_picture(source):  # as datasets decode it
        return png(source)
    if not isinstance(source, str | Path) or not str(source):
        raise ImageError(f"An image is {shown(source)}: it must be a path, a data URI, or the bytes of a file.")
    text = str(source)
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ImageError(f"The data URI of an image is not in base64 ({error}).") from error
    if text.startswith(("http://", "https://")):
        raise ImageError(
            f"The image {text[:200]} is in a network, from which none is fetched: download it, or "
            "have those of rows fetched with --data.fetch_images public."
        )
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        if not stat.S_ISREG(path.stat().st_mode):  # a device or a pipe might never end
            raise ImageError(f"The image {text[:200]} is no file.")
        if path.stat().st_size > MOST_BYTES:
            raise ImageError(f"The image {text[:200]} is larger than {MOST_BYTES // 2**20} MiB.")
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # of paths with a NUL, and of unknown users' homes
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"The image {text[:200]} cannot be read: {reason}.") from error
