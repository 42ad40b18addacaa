"""States of the sequences being decoded, which layers other than attention keep: the last tokens that a convolution
sees, and what a recurrence hands on. They are as large for every length.

Invariant: the states of sequences that were computed together lie together, in the order of that pass, so a step of the
same sequences copies nothing.
Does not own: keys and values (`kv_cache.py`).
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.recurrence import Convolution, ForestRecurrence, Recurrence, Scan


class SequenceStates:
    """The states of sequences, for each call of a pass, in the order in which the model makes them."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[list[Tensor], int]] = {}
        """The states [R, ..] among which those of a sequence are, and its row there."""

    def begin(self, places: Sequence[Hashable]) -> list[Tensor]:
        """Returns an empty list, for the states of each call for these sequences."""
        return self._together(places, [])

    def of(self, places: Sequence[Hashable]) -> list[Tensor]:
        """Returns the states of each call for these sequences, in a list in which others may take their place."""
        found = [self._rows[place] for place in places]
        parts, _ = found[0]
        count = len(parts[0]) if parts else 0
        if [row for _, row in found] == [*range(count)] and all(each is parts for each, _ in found):
            return parts
        begins, size = {}, 0
        for each, _ in found:
            if id(each) not in begins:
                begins[id(each)] = size
                size += len(each[0])
        row_A = to_device(torch.tensor([begins[id(each)] + row for each, row in found]), parts[0].device)
        batches = {id(each): each for each, _ in found}.values()
        joined = [torch.cat(calls).index_select(0, row_A) for calls in zip(*batches, strict=True)]
        return self._together(places, joined)

    def _together(self, places: Sequence[Hashable], parts: list[Tensor]) -> list[Tensor]:
        self._rows |= {place: (parts, row) for row, place in enumerate(places)}
        return parts

    def free(self, places: Iterable[Hashable]) -> None:
        """Ends sequences; what they kept takes memory until the others of its pass are computed anew."""
        for place in places:
            self._rows.pop(place, None)

    def clear(self) -> None:
        """Ends all sequences."""
        self._rows.clear()

    def copy_out(self, place: Hashable) -> tuple[Tensor, ...]:
        """Returns a copy of a sequence's states, [1, ..]."""
        parts, row = self._rows.get(place, ([], 0))
        return tuple(part[row : row + 1].clone() for part in parts)

    def copy_in(self, place: Hashable, states: Sequence[Tensor]) -> None:
        """Begins a sequence with the result of `copy_out`."""
        self._together([place], [*states])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        batches = {id(parts): parts for parts, _ in self._rows.values()}.values()
        return sum(part.nbytes for part in chain.from_iterable(batches))


class RowRecurrence(Recurrence):
    """A pass that appends tokens to sequences, one a row; `added_A`: how many to each, where that differs."""

    def __init__(self, states: list[Tensor], added_A: Tensor | None = None) -> None:
        self._states, self._added_A = states, added_A
        self.stepping = added_A is None
        self._calls = 0

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`."""
        joined = torch.cat([self._states[self._calls], x], dim=-1)
        if self._added_A is None:
            kept = joined[..., x.shape[-1] :]
        else:
            place_AW = self._added_A[:, None] + torch.arange(width - 1, device=x.device)
            kept = joined.gather(2, place_AW[:, None].expand(-1, x.shape[1], -1))
        self._keep(kept)
        return convolution(joined)[..., width - 1 :]

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Implements `Recurrence.scan`."""
        if self._added_A is not None:
            added_AT = torch.arange(columns[0].shape[1], device=columns[0].device) < self._added_A[:, None]
            columns = [x.where(added_AT.view(*added_AT.shape, *[1] * (x.ndim - 2)), 0.0) for x in columns]
        result, after = scan(columns, self._states[self._calls])
        self._keep(after)
        return result

    def _keep(self, after: Tensor) -> None:
        self._states[self._calls] = after
        self._calls += 1


class PrefillRecurrence(Recurrence):
    """A pass over prompts, each of which is the path of one of `leaves`, for `counts` sequences each."""

    stepping = False

    def __init__(
        self, forest: ForestRecurrence, leaves: Sequence[Node], counts: Sequence[int], states: list[Tensor]
    ) -> None:
        self._forest, self._leaves, self._states = forest, leaves, states
        self._row_A = torch.arange(len(leaves)).repeat_interleave(torch.tensor(counts))
        self._last: dict[int, Tensor] = {}

    def convolve(self, convolution: Convolution, x: Tensor, width: int) -> Tensor:
        """Implements `Recurrence.convolve`."""
        if width not in self._last:
            last = [self._forest.last_tokens(leaf, width - 1) for leaf in self._leaves]
            self._last[width] = to_device(torch.stack(last)[self._row_A], x.device)
        padded_MC = functional.pad(x[0].transpose(0, 1), (0, 0, 0, 1))
        self._states.append(padded_MC[self._last[width]].transpose(1, 2))
        return self._forest.convolve(convolution, x, width)

    def scan(self, scan: Scan, columns: Sequence[Tensor]) -> Tensor:
        """Implements `Recurrence.scan`."""
        result, states = self._forest.scan_to_ends(scan, columns)
        self._states.append(torch.cat(states).index_select(0, self._end_A))
        return result

    @cached_property
    def _end_A(self) -> Tensor:
        return to_device(self._forest.ends(self._leaves)[self._row_A], self._forest.device)
