"""Texts in which the tokens of images stand in the place of marks.

Does not own: reading and rendering images (`pictures.py`), nor tokens (`template_codec.py`).
"""

from collections.abc import Sequence

from attrs import frozen

from rollgrad.adapters.chat.pictures import ImageRenderer, RenderedImage, placed_tokens
from rollgrad.domain.episodes.images import PlacedImage, PlacedImages, check_places
from rollgrad.domain.errors import DataError, ImageError, TrajectoryError


@frozen(kw_only=True)
class ImageText:
    """A text with the tokens of `images`, each of which stands for a mark at `marks`, the characters of the text that
    had marks; `mark` is the length of one."""

    text: str
    images: tuple[RenderedImage, ...]
    marks: tuple[int, ...]
    mark: int

    def moved(self, character: int) -> int:
        """Returns the place in `text` of a character of the text that had marks; none inside of a mark."""
        return character + sum(
            len(image.text) - self.mark
            for image, place in zip(self.images, self.marks, strict=True)
            if place + self.mark <= character
        )

    def placed(self, borders: Sequence[tuple[int, int]]) -> PlacedImages:
        """Returns the images among the tokens of `text`, whose characters `borders` are."""
        starts = map(self.moved, self.marks)
        spans = [(start, start + len(image.text)) for start, image in zip(starts, self.images, strict=True)]
        return tuple(
            PlacedImage(image=each.image, start=start, stop=stop)
            for each, (start, stop) in zip(self.images, placed_tokens(borders, spans), strict=True)
        )


def known_images(
    renderer: ImageRenderer, tokens: Sequence[int], files: Sequence[bytes], places: Sequence[tuple[int, int]]
) -> PlacedImages:
    """Returns images that stand among tokens, each at its own of `places` (first token, and the one after the last).

    Raises:
        ImageError: an image cannot be read, or has other tokens than stand in its place.
    """
    if len(files) != len(places):
        raise ImageError(f"There are {len(files)} images at {len(places)} places: each needs one.")
    renderer.check_count(len(files))
    found = []
    for file, (start, stop) in zip(files, places, strict=True):
        rendered = renderer.render(file)
        marks, wanted = list(tokens[start:stop]).count(renderer.mark_token), rendered.text.count(renderer.mark)
        if marks != wanted:
            raise ImageError(
                f"The tokens {start} to {stop} have {marks} of the {wanted} that stand for the image there: it is "
                "another image, or they are of another model."
            )
        found.append(PlacedImage(image=rendered.image, start=start, stop=stop))
    try:
        check_places(found, len(tokens))
    except TrajectoryError as error:
        raise ImageError(str(error)) from error
    return tuple(found)


def with_images(renderer: ImageRenderer, marked: str, files: Sequence[bytes], *, earlier: int = 0) -> ImageText:
    """Returns a text with an image of `files` in the place of each mark; `earlier` images stand before the text.

    Raises:
        DataError: there are more marks than images, or fewer, or several of a model that takes one.
    """
    renderer.check_count(earlier + len(files))
    pieces = marked.split(renderer.mark)
    if len(pieces) != len(files) + 1:
        raise DataError(
            f"The text has {len(pieces) - 1} marks for {len(files)} images: put images into messages that the chat "
            "template writes them for (the user's)."
        )
    images = tuple(map(renderer.render, files))
    whole, marks, place = pieces[0], [], 0
    for image, before, after in zip(images, pieces, pieces[1:], strict=False):
        place += len(before)
        marks.append(place)
        place += len(renderer.mark)
        whole += image.text + after
    return ImageText(text=whole, images=images, marks=tuple(marks), mark=len(renderer.mark))
