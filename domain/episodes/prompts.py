"""Prompts, and a run's position in their stream.

`PromptCursor` is the whole state of a prompt stream: the order of an epoch is a pure function of (seed, epoch), so
resuming is arithmetic and no iterator has to be saved.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import evolve, field, frozen

from rollgrad.domain.episodes.images import PlacedImages

EPOCH_SEED_STRIDE = 1_000_003
"""A prime above any number of epochs, so that no two (seed, epoch) pairs of a run share a permutation."""


@frozen(kw_only=True)
class Prompt:
    """One task: the policy's input as token ids, and the data that its reply is judged by."""

    token_ids: tuple[int, ...]
    text: str
    """The rendered prompt (chat template applied)."""
    label: Any = None
    """Data that the reward source needs, such as the reference answer; None where it needs nothing."""
    datasource: str = "default"
    """Name of the origin, for metrics of each."""
    metadata: Mapping[str, Any] = field(factory=dict)
    """The source's own entry."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that was rendered; empty for a prompt that was text from the start."""
    images: PlacedImages = ()
    """Images that some of the tokens stand for."""
    teacher_token_ids: tuple[int, ...] = ()
    """Tokens that a teacher reads in the place of `token_ids`; empty if it reads these."""


@frozen
class PromptCursor:
    """The next prompt is number `index` of epoch `epoch` in the order that `seed` gives."""

    seed: int
    epoch: int = 0
    index: int = 0

    def order(self, size: int, *, shuffle: bool = True) -> torch.Tensor:
        """Returns the permutation of `size` prompts in this epoch."""
        if not shuffle:
            return torch.arange(size)
        return _permutation(self.seed * EPOCH_SEED_STRIDE + self.epoch, size)

    def take(self, count: int, size: int, *, shuffle: bool = True) -> tuple[list[int], "PromptCursor"]:
        """Returns the dataset indices of the next `count` prompts, and the cursor after them; wraps into the next
        epoch.

        Raises:
            ValueError: `size` is not positive.
        """
        if size <= 0:
            raise ValueError(f"The stream has {size} prompts: it needs at least one.")
        taken: list[int] = []
        cursor = self
        while len(taken) < count:
            order = cursor.order(size, shuffle=shuffle)
            chunk = order[cursor.index : cursor.index + count - len(taken)]
            taken.extend(chunk.tolist())
            end = cursor.index + len(chunk)
            # At the end of an epoch the cursor moves on at once: (epoch, size) and (epoch + 1, 0) would be two states
            # of the same position.
            cursor = PromptCursor(cursor.seed, cursor.epoch + 1, 0) if end == size else evolve(cursor, index=end)
        return taken, cursor

    def taken(self, size: int) -> int:
        """Returns how many of `size` prompts were taken so far, each as often as there were epochs."""
        return self.epoch * size + self.index

    def state_dict(self) -> dict[str, int]:
        """Returns the position, JSON-serialisable."""
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, int]) -> "PromptCursor":
        """Returns the cursor that `state_dict` described."""
        return cls(int(state["seed"]), int(state["epoch"]), int(state["index"]))


@lru_cache(maxsize=2)  # many steps take from one epoch, and one from two
def _permutation(seed: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
