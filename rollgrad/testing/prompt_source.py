"""A `PromptSource` over prompts held in a list."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.domain.episodes.prompts import Prompt, PromptCursor
from rollgrad.domain.ports.prompt_source import PromptSource


class FakePromptSource(PromptSource):
    """Streams `prompts`, in order unless `shuffle`."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = False) -> None:
        self._prompts = list(prompts)
        self._shuffle = shuffle
        self.cursor = PromptCursor(seed)

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts, from the beginning again after the last."""
        indices, self.cursor = self.cursor.take(count, len(self._prompts), shuffle=self._shuffle)
        return [self._prompts[index] for index in indices]

    def prompts(self) -> list[Prompt]:
        """Returns all prompts in order."""
        return list(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a place in the stream."""
        self.cursor = PromptCursor.from_state_dict(state)
