"""Keys and values of the sequences being decoded, in blocks of a fixed number of tokens; and states (`states.py`).

Invariants: the blocks in use are always the first ones, because those of a sequence that ends are filled with the last
ones, so decoding reads no hole; a sequence's blocks may lie anywhere among them. What is stored is never copied to make
room for more: all blocks that the memory has room for are allocated at once, which on a CPU takes no memory until they
are used. `release` gives everything back.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from attrs import define, field, frozen
from torch import Tensor

from rollgrad.adapters.engines.embedded.states import SequenceStates
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.application.settings.memory_plan_passes import CACHE_BLOCK
from rollgrad.domain.errors import EngineError

BLOCK = CACHE_BLOCK
"""Tokens of a block."""


def blocks_of(tokens: int) -> int:
    """Returns the number of blocks that `tokens` tokens take."""
    return -(-tokens // BLOCK)


@define(eq=False)
class Place:
    """The blocks of one sequence, in the order of its tokens."""

    blocks: list[int] = field(factory=list)


@frozen(eq=False)
class StoredKeys:
    """The store of one sequence's first `length` tokens: keys and values [heads, length, width] for each
    attention, and the `states` after them."""

    pairs: tuple[tuple[Tensor, Tensor], ...]
    length: int
    states: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (*chain.from_iterable(self.pairs), *self.states))


class KVCache:
    """Keys and values of each attention of a forward pass, in the order in which the model calls them, both [blocks,
    heads, BLOCK, width]. Heads and widths are those of the first that are seen: they may differ from attention
    to attention, and keys may be wider than values."""

    def __init__(self) -> None:
        self.capacity = 0
        """Blocks at most; may change while there are no pairs."""
        self.states = SequenceStates()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._owners: list[tuple[Place, int]] = []
        """The sequence of each block in use, and the index of the block in it."""
        self._written = 0
        """Blocks that hold numbers; what lies in the others is arbitrary, and may be no number."""

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return len(self._owners)

    def reserve(self, place: Place, tokens: int) -> None:
        """Makes room for `tokens` tokens of a sequence, keeping what is stored.

        Raises:
            EngineError: no block is left.
        """
        if self.used + blocks_of(tokens) - len(place.blocks) > self.capacity:
            raise EngineError(f"The engine's cache of {self.capacity} blocks is full.")
        while len(place.blocks) < blocks_of(tokens):
            self._owners.append((place, len(place.blocks)))
            place.blocks.append(len(self._owners) - 1)
        if self.used > self._written:
            for part in (part for pair in self._pairs for part in pair):
                part[self._written : self.used] = 0.0
            self._written = self.used

    def pair(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the `index`-th attention of a pass, which is called with `key` and `value`,
        each [.., heads, .., width]."""
        if index == len(self._pairs):
            made = [x.new_empty(self.capacity, x.shape[1], BLOCK, x.shape[3]) for x in (key, value)]
            for part in made:
                part[: self._written] = 0.0
            self._pairs.append((made[0], made[1]))
        return self._pairs[index]

    def free(self, places: Iterable[Place]) -> None:
        """Ends sequences; the last blocks are copied to where theirs were.

        For example, blocks [a0, b0, a1, c0, b1] lose those of a: b1 is copied to block 0, and c0 to block 2.
        """
        ended, holes = [*places], set()
        self.states.free(ended)
        for place in ended:
            holes.update(place.blocks)
            place.blocks = []
        left = self.used - len(holes)
        targets = sorted(hole for hole in holes if hole < left)
        sources = [number for number in range(left, self.used) if number not in holes]
        for source, target in zip(sources, targets, strict=True):
            place, index = self._owners[target] = self._owners[source]
            place.blocks[index] = target
        del self._owners[left:]
        if sources and self._pairs:
            # Moved once: a GPU would get lists anew for each part.
            to, of = to_device(torch.tensor([targets, sources]), self._pairs[0][0].device)
            for part in (part for pair in self._pairs for part in pair):
                part[to] = part[of]

    def clear(self) -> None:
        """Ends all sequences."""
        for place, _ in self._owners:
            place.blocks = []
        self._owners.clear()
        self.states.clear()

    def copy_out(self, place: Place, length: int) -> StoredKeys:
        """Returns a copy of the first `length` tokens of a sequence; states are those after all that it stores."""
        numbers = torch.tensor(place.blocks[: blocks_of(length)])
        if self._pairs:
            numbers = to_device(numbers, self._pairs[0][0].device)
        pairs = tuple(
            (_joined(keys, numbers, length), _joined(values, numbers, length)) for keys, values in self._pairs
        )
        return StoredKeys(pairs, length, self.states.copy_out(place))

    def copy_in(self, place: Place, stored: StoredKeys) -> None:
        """Copies the result of `copy_out` to the beginning of a sequence, which has room for it."""
        self.states.copy_in(place, stored.states)
        for call, pair in enumerate(stored.pairs):
            for room, part in zip(self.pair(call, *(part[None] for part in pair)), pair, strict=True):
                for index, number in enumerate(place.blocks[: blocks_of(stored.length)]):
                    tokens = part[:, index * BLOCK : (index + 1) * BLOCK]
                    room[number, :, : tokens.shape[1]] = tokens

    def release(self) -> None:
        """Ends all sequences and frees the memory."""
        self.clear()
        self._pairs, self._written = [], 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, on a CPU more than are held."""
        return sum(part.nbytes for pair in self._pairs for part in pair) + self.states.nbytes


def table(places: Sequence[Place]) -> Tensor:
    """Returns the blocks of sequences [A, K]; a shorter one's row is filled up with its own first block."""
    longest = max(len(place.blocks) for place in places)
    return torch.tensor([place.blocks + place.blocks[:1] * (longest - len(place.blocks)) for place in places])


def _joined(part: Tensor, numbers: Tensor, length: int) -> Tensor:
    """Returns a copy of the first `length` tokens in blocks, [heads, length, width]."""
    heads, width = part.shape[1], part.shape[3]
    return part.index_select(0, numbers).transpose(0, 1).reshape(heads, -1, width)[:, :length].contiguous()
