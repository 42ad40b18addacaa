"""Strided parts of tensors, and what a run of a tensor's elements has of them.

A tensor arrives run by run (`shared_buckets`), and a receiver wants a part of it: the rows of its share, or of each row
a half. `parts_within` divides a copy from such a part by runs. So the wanted elements of a run are read where they lie,
and no tensor is ever put together. Does not own: which parts a receiver wants.
"""

from collections.abc import Iterator, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor


@frozen
class Region:
    """A strided part of flat memory; offset and strides count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Region":
        """Returns the region that a tensor has of its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def view(self, memory: Tensor, begin: int = 0) -> Tensor:
        """Returns this region of a tensor of which `memory` has the elements from `begin` on."""
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset - begin)

    def last(self) -> int:
        """Returns the largest offset of an element; the region is not empty."""
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def axes(self) -> list[int]:
        """Returns the axes with more than one index, that of the largest stride first."""
        return sorted((axis for axis, size in enumerate(self.shape) if size > 1), key=lambda axis: -self.strides[axis])

    def nested(self) -> bool:
        """Returns whether an index of each axis spans more memory than all axes of smaller strides, as in a part of a
        contiguous tensor whose axes are in any order; none is repeated."""
        span = 0
        for axis in reversed(self.axes()):
            if self.strides[axis] <= span:
                return False
            span += (self.shape[axis] - 1) * self.strides[axis]
        return True

    def along(self, axis: int, indices: range) -> "Region":
        """Returns the region's part at consecutive indices of an axis."""
        shape: Sequence[int] = (*self.shape[:axis], len(indices), *self.shape[axis + 1 :])
        return Region(self.offset + indices.start * self.strides[axis], tuple(shape), self.strides)


def parts_within(source: Region, target: Region, begin: int, end: int) -> Iterator[tuple[Region, Region]]:
    """Yields the parts of a copy whose source elements have offsets from `begin` to before `end`, as regions of source
    and target of equal shapes. For example, columns 2 and 3 of a matrix of 4 columns have the offsets 2, 3, 6, 7, 10,
    11 and so on. The run from 3 to 11 then has the second element of the first row, both of the next row, and the first
    of the row after that.
    """
    last = source.last()
    if last < begin or source.offset >= end:
        return
    if begin <= source.offset and last < end:
        yield source, target
        return
    axis = max((index for index, size in enumerate(source.shape) if size > 1), key=lambda index: source.strides[index])
    step, size = source.strides[axis], source.shape[axis]
    # From here on offsets count from the source's own. Index i of the axis has those from i step to i step + inner.
    inner = last - source.offset - (size - 1) * step
    first, final = begin - source.offset, end - 1 - source.offset
    touched = range(max(0, -((inner - first) // step)), min(size, final // step + 1))  # some elements are wanted
    inside = range(max(0, -(-first // step)), min(size, (final - inner) // step + 1))  # all of them are
    if inside:
        yield source.along(axis, inside), target.along(axis, inside)
    for index in touched:
        if index not in inside:
            one = range(index, index + 1)
            yield from parts_within(source.along(axis, one), target.along(axis, one), begin, end)


def elements_within(source: Region, target: Region, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which elements at `offsets`, int64 and increasing, a copy from `source`, which is nested, has: their
    indices in `offsets`, and their offsets in `target`, both int64. For example, of elements 1, 3 and 6 of a matrix of
    4 columns, a copy of columns 2 and 3 to a matrix of their own has the last two, to its elements 1 and 2.
    """
    bounds = offsets.new_tensor([source.offset, source.last() + 1])
    first, end = torch.searchsorted(offsets, bounds).tolist()
    rest = offsets[first:end] - source.offset
    axes = _joined_axes(source, target)
    if len(axes) == 1 and axes[0].stride == 1:  # a run without gaps
        places = rest if axes[0].target_stride == 1 else rest * axes[0].target_stride
        return torch.arange(first, end, device=offsets.device), places + target.offset
    places = torch.full_like(rest, target.offset)
    inside = torch.ones_like(rest, dtype=torch.bool)
    for axis in axes:
        index = rest if axis.stride == 1 else torch.div(rest, axis.stride, rounding_mode="floor")
        inside &= index < axis.size
        rest = rest - index * axis.stride
        places += index * axis.target_stride
    found = (inside & (rest == 0)).nonzero().squeeze(1)
    return found + first, places[found]


@frozen
class _Axis:
    """An axis, or several joined into one, of a copy's source and target."""

    size: int
    stride: int
    """That of the source."""
    target_stride: int

    def contains(self, inner: "_Axis") -> bool:
        """Returns whether a step of this axis is a whole run of the inner axis, in the source and in the target."""
        return (self.stride, self.target_stride) == (inner.size * inner.stride, inner.size * inner.target_stride)


def _joined_axes(source: Region, target: Region) -> list[_Axis]:
    """Returns the axes of `source.axes()`; neighbours that are one axis in both regions are joined."""
    joined: list[_Axis] = []
    for number in source.axes():
        axis = _Axis(source.shape[number], source.strides[number], target.strides[number])
        if joined and joined[-1].contains(axis):
            axis = evolve(axis, size=axis.size * joined.pop().size)
        joined.append(axis)
    return joined
