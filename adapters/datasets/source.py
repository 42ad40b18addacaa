"""`DatasetPromptSource`: a stream of prompts over a dataset held by index.

Invariant: the position is a `PromptCursor`, so resuming is arithmetic; prompts are built when they are taken.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from rollgrad.adapters.datasets.prompt_builder import PromptBuilder
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.domain.prompts import Prompt, PromptCursor


class Rows(Protocol):
    """A dataset by index: a `datasets.Dataset`, or a list of mappings."""

    def __len__(self) -> int:
        """Rows there are."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Row `index`."""
        ...


class DatasetPromptSource(PromptSource):
    """Prompts of `dataset`, in a new random order each epoch, or in file order without `shuffle`.

    `max_samples` keeps the first rows only. The column `datasource`, where there is one, names each prompt's origin.

    Raises:
        DataError: there are no rows.
    """

    def __init__(
        self,
        dataset: Rows,
        builder: PromptBuilder,
        *,
        seed: int,
        shuffle: bool = True,
        max_samples: int | None = None,
    ) -> None:
        self._size = len(dataset) if max_samples is None else min(len(dataset), max_samples)
        if self._size <= 0:
            raise DataError(
                f"The prompt dataset has {len(dataset)} rows and --data.max-samples is {max_samples}: "
                "at least one prompt is needed."
            )
        self._dataset = dataset
        self._builder = builder
        self._shuffle = shuffle
        self._cursor = PromptCursor(seed)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; wraps into the next epoch.

        Raises:
            DataError: a row cannot become a prompt; the position then stays where it was.
        """
        indices, cursor = self._cursor.take(count, self._size, shuffle=self._shuffle)
        prompts = [self._prompt(index) for index in indices]
        self._cursor = cursor
        return prompts

    def prompts(self) -> list[Prompt]:
        """Every prompt once, in file order; leaves the position alone."""
        return [self._prompt(index) for index in range(self._size)]

    def __len__(self) -> int:
        return self._size

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-serialisable."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.

        Raises:
            DataError: the position lies beyond the end of this dataset.
        """
        cursor = PromptCursor.from_state_dict(state)
        if cursor.index >= self._size:
            raise DataError(
                f"The run stopped at prompt {cursor.index} of an epoch, but the dataset has only {self._size} "
                "prompts: continue with the dataset the run started with (--data.prompt-dataset)."
            )
        self._cursor = cursor

    def _prompt(self, index: int) -> Prompt:
        row = self._dataset[index]
        return self._builder.build(row, str(row.get("datasource", "default")))
