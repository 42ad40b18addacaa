"""Keys and values of the sequences being decoded, in slots that are always filled from the front.

Invariants: rows 0..A-1 are the active sequences; a row that finishes is overwritten by a later one, so decoding
never reads a hole. Grows on demand; `release` gives everything back.
"""

from collections import OrderedDict

from attrs import frozen
from torch import Tensor

LENGTH_STEP = 64
"""Capacity along time grows in multiples of this."""


@frozen(eq=False)
class StoredKeys:
    """Keys and values of one sequence's first `length` tokens: a pair of [heads, length, width] for each attention."""

    pairs: tuple[tuple[Tensor, Tensor], ...]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for pair in self.pairs for part in pair)


class KVCache:
    """Keys and values of each attention of a forward pass, in the order in which the model calls them, both [rows,
    heads, time, width]. Heads and widths are those of the first that are seen: they may differ from attention
    to attention, and keys may be wider than values."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._rows = self._length = 0

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` sequences of `length` tokens, keeping what is stored."""
        if rows <= self._rows and length <= self._length:
            return
        self._rows = max(rows, self._rows)
        self._length = max(-(-length // LENGTH_STEP) * LENGTH_STEP, self._length)
        self._pairs = [(self._grown(keys), self._grown(values)) for keys, values in self._pairs]

    def _grown(self, stored: Tensor) -> Tensor:
        grown = self._room(stored)
        grown[: stored.shape[0], :, : stored.shape[2]] = stored
        return grown

    def _room(self, like: Tensor) -> Tensor:
        """Returns zeros for tensors with the heads and the width of `like`, [.., heads, .., width]."""
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])

    def pair(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the `index`-th attention of a pass, which is called with `key` and `value`,
        each [.., heads, .., width]."""
        if index == len(self._pairs):
            self._pairs.append((self._room(key), self._room(value)))
        return self._pairs[index]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies rows `sources` over rows `targets`."""
        if sources:
            for pair in self._pairs:
                for part in pair:
                    part[targets] = part[sources]

    def copy_out(self, row: int, length: int) -> StoredKeys:
        """Returns a copy of the first `length` tokens of a row."""
        pairs = tuple((k[row, :, :length].clone(), v[row, :, :length].clone()) for k, v in self._pairs)
        return StoredKeys(pairs, length)

    def copy_in(self, row: int, stored: StoredKeys) -> None:
        """Copies the result of `copy_out` to the beginning of a row."""
        for index, pair in enumerate(stored.pairs):
            places = self.pair(index, *(part[None] for part in pair))
            for place, part in zip(places, pair, strict=True):
                place[row, :, : stored.length] = part

    def release(self) -> None:
        """Frees the memory."""
        self._pairs, self._rows, self._length = [], 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for pair in self._pairs for part in pair)


class KeptSequences:
    """Keys and values of finished sequences that another request is expected to continue.

    Args:
        max_bytes: memory for them; the longest unused go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[int, ...], StoredKeys] = OrderedDict()

    def keep(self, tokens: tuple[int, ...], stored: StoredKeys) -> None:
        """Keeps the result of `KVCache.copy_out` for `tokens`."""
        self._remove(tokens)
        self._kept[tokens] = stored
        self._bytes += stored.nbytes
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def take(self, prompt: tuple[int, ...]) -> StoredKeys | None:
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

    def _remove(self, tokens: tuple[int, ...]) -> StoredKeys | None:
        stored = self._kept.pop(tokens, None)
        if stored is not None:
            self._bytes -= stored.nbytes
        return stored
