"""Port: where numbers are kept that a frozen model gives for examples."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ScoreStore(Protocol):
    """Promises: what `append` has returned from is found by `load`, also after the process died."""

    def load(self, key: str) -> list[Tensor]:
        """Returns the scores kept under `key`: those of the first examples, one after the other, without a gap."""
        ...

    def append(self, key: str, first: int, scores: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keeps the scores of examples `first`, `first` + 1, ...: one tensor [A] for each, all of one
        format. Returns them as `load` does, so that those of large data need not stay in memory."""
        ...
