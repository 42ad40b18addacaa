"""A double of CUDA graphs on a CPU, as strict as they are about addresses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded.kv_cache import KVCache
from rollgrad.adapters.engines.embedded.plans import DecodeInputs


class Recorder:
    """Captures by keeping the function. A replay refuses where a graph would compute nonsense without a word: where
    weights, inputs or what is stored lie elsewhere than at the capture. Its result lies where the captured one does."""

    def __init__(self, model: Any) -> None:
        self._weights = [*model.parameters(), *model.buffers()]
        self.cache = KVCache()
        """The cache of the decoder whose steps are captured."""
        self.captures = self.replays = 0
        self.shapes: set[tuple[int, int, int]] = set()
        """A, K and B of each capture."""

    def __call__(
        self, compute: Callable[[DecodeInputs], Tensor], inputs: DecodeInputs
    ) -> tuple[Tensor, Callable[[], object]]:
        """Implements `Capture`."""
        self.captures += 1
        rows, most = inputs.table_AK.shape
        self.shapes.add((rows, most, len(inputs.row_B)))
        result = compute(inputs)
        captured = self._places(inputs)

        def replay() -> None:
            self.replays += 1
            assert self._places(inputs) == captured, "a graph computes at the addresses of its capture"
            result.copy_(compute(inputs))

        return result, replay

    def _places(self, inputs: DecodeInputs) -> list[tuple[int, torch.Size]]:
        stored = [part for pair in self.cache._pairs for part in pair]
        return [(part.data_ptr(), part.shape) for part in (*self._weights, *inputs, *stored)]
