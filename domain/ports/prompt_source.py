"""Port: the stream of prompts."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rollgrad.domain.episodes.prompts import Prompt


@runtime_checkable
class PromptSource(Protocol):
    """An endless stream of prompts. Promises: it is a pure function of the data, the seed and the position, and starts
    again at its end.

    Errors: `DataError` for data that cannot be read or lacks a key.
    """

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts; moves the position."""
        ...

    def __len__(self) -> int:
        """Returns the number of prompts in one epoch, at least 1."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, JSON-serialisable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        ...
