"""Files of images that sampled replies are to, beside the file of their rows.

Invariant: the name of a file that is written is the hash of its content, so that an image is there once, whatever shows
it. Does not own: rows (`replies.py`), nor what an image is.
"""

import hashlib
from pathlib import Path

from rollgrad.adapters.chat.pictures import image_sources
from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.episodes.images import TYPES
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import CheckpointError


class KeptImages:
    """Images of the rows in the file `rows`: those that are no files of their own are written to a folder beside it."""

    def __init__(self, rows: Path) -> None:
        self._folder = rows.with_name(f"{rows.name}.images")

    def paths(self, prompt: Prompt) -> list[str]:
        """Returns the path of each image of a prompt, in the order of its tokens.

        Raises:
            CheckpointError: an image cannot be written.
        """
        found = []
        for source, placed in zip(image_sources(prompt.messages), prompt.images, strict=True):
            if isinstance(source, str | Path) and not str(source).startswith("data:"):
                found.append(str(Path(str(source).removeprefix("file://")).expanduser().absolute()))
            else:
                found.append(self._written(placed.image.data))
        return found

    def _written(self, data: bytes) -> str:
        kinds = (kind for begins, kind in TYPES.items() if data.startswith(begins))
        kind = next(kinds, "image/image").rpartition("/")[2]
        path = self._folder / f"{hashlib.sha256(data).hexdigest()[:32]}.{kind}"
        if not path.exists():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(path, data)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written ({error.strerror or error}): {remedy(error)}, and start again."
                ) from error
        return str(path)
