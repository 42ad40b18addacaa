"""Keys and values of the sequences being decoded, in slots that are always filled from the front.

Invariants: rows 0..A-1 are the active sequences; a row that finishes is overwritten by a later one, so decoding
never reads a hole. Grows on demand; `release` gives everything back.
"""

import torch
from torch import Tensor

LENGTH_STEP = 64
"""Capacity along time grows in multiples of this."""


class KVCache:
    """[layers, 2, rows, key heads, time, head dim] in one tensor."""

    def __init__(self, *, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, heads, dim)
        self._dtype, self._device = dtype, device
        self._data: Tensor | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` sequences of `length` tokens, keeping what is stored."""
        layers, heads, dim = self._shape
        old = self._data
        old_rows, old_length = (0, 0) if old is None else (old.shape[2], old.shape[4])
        if rows <= old_rows and length <= old_length:
            return
        new_rows = max(rows, old_rows)
        new_length = max(-(-length // LENGTH_STEP) * LENGTH_STEP, old_length)
        shape = (layers, 2, new_rows, heads, new_length, dim)
        data = torch.zeros(shape, dtype=self._dtype, device=self._device)
        if old is not None:
            data[:, :, :old_rows, :, :old_length] = old
        self._data = data

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [rows, key heads, time, head dim]."""
        assert self._data is not None
        return self._data[index, 0], self._data[index, 1]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies rows `sources` over rows `targets`."""
        if sources:
            assert self._data is not None
            self._data[:, :, targets] = self._data[:, :, sources]

    def release(self) -> None:
        """Frees the memory."""
        self._data = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._data is None else self._data.nbytes
