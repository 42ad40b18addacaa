"""Images of an episode, and where they stand among its tokens.

Invariants: an image is told from another by its digest alone, so that a group of rollouts, the branches of one and the
sequences of a batch share one copy of its tensors. Does not own: reading images and computing tensors
(`adapters/chat/pictures.py`), nor what a model makes of them.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from rollgrad.domain.errors import TrajectoryError

if TYPE_CHECKING:  # settings import this module, and no torch
    from torch import Tensor


TYPES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
"""Media types by the first bytes of a file: those that OpenAI's and Anthropic's servers take."""


@frozen(kw_only=True)
class Image:
    """One image. Equal digests make equal images."""

    digest: str
    """Sha256 of the file and of the settings that made the tensors."""
    data: bytes = field(eq=False, repr=False)
    """Bytes of the file."""
    tensors: "Mapping[str, Tensor]" = field(eq=False, repr=False)
    """Tensors that the model takes, by the names of its arguments."""

    @property
    def data_uri(self) -> str:
        """The file in a data URI, with its type if that is one of `TYPES`."""
        known = (kind for begins, kind in TYPES.items() if self.data.startswith(begins))
        return f"data:{next(known, 'application/octet-stream')};base64,{b64encode(self.data).decode()}"


@frozen(kw_only=True)
class PlacedImage:
    """An image that the tokens `start` to `stop` (half-open) of a sequence stand for."""

    image: Image
    start: int
    stop: int

    def moved(self, tokens: int) -> "PlacedImage":
        """Returns the image `tokens` later in its sequence."""
        return evolve(self, start=self.start + tokens, stop=self.stop + tokens)


PlacedImages = tuple[PlacedImage, ...]
"""Images of one sequence, in the order of their tokens, which never overlap."""


def check_places(images: Sequence[PlacedImage], length: int) -> None:
    """Checks that images stand among `length` tokens, one after the other.

    Raises:
        TrajectoryError: they do not.
    """
    end = 0
    for placed in images:
        if not end <= placed.start < placed.stop <= length:
            raise TrajectoryError(
                f"An image stands at the tokens {placed.start} to {placed.stop} of {length}, of which {end} are taken."
            )
        end = placed.stop
