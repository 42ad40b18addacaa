"""Port: the stream of prompts."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rollgrad.domain.episodes.prompts import Prompt


@runtime_checkable
class PromptSource(Protocol):
    """Promises: the stream is a pure function of the data, the seed and the position; it wraps at its end.

    Errors: `DataError` for data that cannot be read or lacks a key.
    """

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts; moves the position."""
        ...

    def __len__(self) -> int:
        """Prompts in one epoch, at least 1."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, JSON-serialisable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        ...
