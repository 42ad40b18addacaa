"""Keys and values of the sequences being decoded, in slots that are always filled from the front.

Invariants: rows 0..A-1 are the active sequences; a row that finishes is overwritten by a later one, so decoding
never reads a hole. Grows on demand; `release` gives everything back.
"""

from collections import OrderedDict

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

    def copy_out(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` tokens of a row."""
        assert self._data is not None
        return self._data[:, :, row, :, :length].clone()

    def copy_in(self, row: int, stored: Tensor) -> None:
        """Puts what `copy_out` gave at the beginning of a row."""
        assert self._data is not None
        self._data[:, :, row, :, : stored.shape[3]] = stored

    def release(self) -> None:
        """Frees the memory."""
        self._data = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._data is None else self._data.nbytes


class KeptSequences:
    """Keys and values of finished sequences that another request is expected to continue.

    Args:
        max_bytes: memory for them; the longest unused go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def keep(self, tokens: tuple[int, ...], stored: Tensor) -> None:
        """Keeps what `KVCache.copy_out` gave for `tokens`."""
        self._remove(tokens)
        self._kept[tokens] = stored
        self._bytes += stored.nbytes
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def take(self, prompt: tuple[int, ...]) -> Tensor | None:
        """Removes and returns the longest kept sequence that `prompt` begins with and goes on after; None if there is
        none."""
        for length in sorted({len(tokens) for tokens in self._kept if len(tokens) < len(prompt)}, reverse=True):
            stored = self._remove(prompt[:length])
            if stored is not None:
                return stored
        return None

    def clear(self) -> None:
        """Forgets everything: the weights have changed, or memory is needed."""
        self._kept.clear()
        self._bytes = 0

    def _remove(self, tokens: tuple[int, ...]) -> Tensor | None:
        stored = self._kept.pop(tokens, None)
        if stored is not None:
            self._bytes -= stored.nbytes
        return stored
