"""Scores of a frozen model in files of the cache directory, so that later runs do not compute them again."""

import io
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)


class ScoreFiles(ScoreStore):
    """Keeps scores below `directory`, in a directory for each key: a file holds those of consecutive examples, and is
    named by the first. None keeps nothing. A cache is no promise: files that cannot be read or written cost time."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self, key: str) -> list[Tensor]:
        """Returns the scores of the first examples, as many as there are without a gap."""
        if self._directory is None:
            return []
        scores: list[Tensor] = []
        for path in sorted((self._directory / key).glob("*.pt")):
            if int(path.stem) != len(scores):
                break
            try:
                scores.extend(_mapped(path))
            except Exception as error:  # whatever a broken file makes of unpickling
                log.warning("kept scores cannot be read: they are computed again", path=str(path), reason=str(error))
                break
        return scores

    def append(self, key: str, first: int, scores: Sequence[Tensor]) -> Sequence[Tensor]:
        """Writes one file, and returns the scores in it; a warning is logged if it cannot be written."""
        if self._directory is None or not scores:
            return scores
        content = io.BytesIO()
        torch.save({"scores_A": torch.cat(list(scores)), "lengths": [len(score) for score in scores]}, content)
        try:
            (self._directory / key).mkdir(parents=True, exist_ok=True)
            path = self._directory / key / f"{first:012d}.pt"
            replace_file(path, content.getvalue())
        except OSError as error:
            log.warning("scores are not kept", directory=str(self._directory), reason=str(error))
            return scores
        try:
            return _mapped(path)
        except Exception:  # another process removed the file, or it cannot be mapped: they are in memory
            return scores


def _mapped(path: Path) -> Sequence[Tensor]:
    """Returns the scores in a file, which are read where they are needed."""
    saved = torch.load(path, weights_only=True, mmap=True)
    scores: Sequence[Tensor] = saved["scores_A"].split(saved["lengths"])
    return scores
