"""`DatasetPromptSource`: a stream of prompts from a dataset that is read by index.

Invariants: every row is checked before the first prompt is taken (`survey`), so that no row fails later. The position
is a `PromptCursor` over all rows, so that resuming is arithmetic, and the order of the kept prompts does not depend on
the rows that are skipped. Prompts are built when they are taken.
"""

from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.survey import Rows, datasource_of, survey
from rollgrad.domain.episodes.prompts import Prompt, PromptCursor
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.prompt_source import PromptSource


class DatasetPromptSource(PromptSource):
    """Prompts of `dataset`, in a new random order each epoch.

    `max_samples` keeps the first rows only. The column `datasource`, if there is one, names each prompt's origin.
    `setting` names the dataset in errors.

    Raises:
        DataError: there are no rows, or rows that cannot become prompts.
    """

    def __init__(
        self,
        dataset: Rows,
        builder: PromptBuilder,
        *,
        seed: int,
        max_samples: int | None = None,
        setting: str = "data.prompt_dataset",
    ) -> None:
        self._size = len(dataset) if max_samples is None else min(len(dataset), max_samples)
        if self._size <= 0:
            raise DataError(
                f"The prompt dataset has {len(dataset)} rows and --data.max_samples is {max_samples}: "
                "at least one prompt is needed."
            )
        self.survey = survey(dataset, self._size, builder, setting=setting)
        """Lengths of all prompts, and which are kept."""
        self._kept = self.survey.kept
        self._dataset = dataset
        self._builder = builder
        self._cursor = PromptCursor(seed)

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts; wraps into the next epoch."""
        indices: list[int] = []
        cursor = self._cursor
        while len(indices) < count:
            drawn, cursor = cursor.take(count - len(indices), self._size)
            indices += filter(self.survey.keeps, drawn)
        prompts = [self.prompt(index) for index in indices]
        self._cursor = cursor
        return prompts

    def prompts(self) -> list[Prompt]:
        """Returns every prompt once, in file order; leaves the position alone."""
        return [self.prompt(index) for index in range(self._size) if self.survey.keeps(index)]

    def __len__(self) -> int:
        return self._kept

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, JSON-serialisable."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.

        Raises:
            DataError: the position lies beyond the end of this dataset.
        """
        cursor = PromptCursor.from_state_dict(state)
        if cursor.index >= self._size:
            raise DataError(
                f"The run stopped at row {cursor.index} of an epoch, but the dataset has only {self._size} "
                "rows: continue with the dataset the run started with (--data.prompt_dataset)."
            )
        self._cursor = cursor

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of row `index`."""
        row = self._dataset[index]
        return self._builder.build(row, datasource_of(row))
