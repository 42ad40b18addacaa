"""Strided parts of tensors, and what a run of a tensor's elements has of them.

A tensor arrives run by run (`shared_buckets`), and a receiver wants a part of it: the rows of its share, or of each row
a half. `parts_within` divides a copy from such a part by runs, so that a run is read where it lies, as far as it is
wanted, and no tensor is ever put together. Does not own: which parts a receiver wants.
"""

from collections.abc import Iterator, Sequence

from attrs import frozen
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

    def along(self, axis: int, indices: range) -> "Region":
        """Returns the region's part at consecutive indices of an axis."""
        shape: Sequence[int] = (*self.shape[:axis], len(indices), *self.shape[axis + 1 :])
        return Region(self.offset + indices.start * self.strides[axis], tuple(shape), self.strides)


def parts_within(source: Region, target: Region, begin: int, end: int) -> Iterator[tuple[Region, Region]]:
    """Yields the parts of a copy whose source elements have offsets from `begin` to before `end`, as regions of source
    and target of equal shapes. For example, of columns 2 and 3 of a matrix of 4 columns, which has offsets 2, 3, 6, 7,
    10, 11 and so on, the run from 3 to 11 has the second element of the first row, the next row, and the first element
    of the one after that.
    """
    last = source.last()
    if last < begin or source.offset >= end:
        return
    if begin <= source.offset and last < end:
        yield source, target
        return
    axis = max((index for index, size in enumerate(source.shape) if size > 1), key=lambda index: source.strides[index])
    step, size = source.strides[axis], source.shape[axis]
    inner = last - source.offset - (size - 1) * step
    first, final = begin - source.offset, end - 1 - source.offset
    touched = range(max(0, -((inner - first) // step)), min(size, final // step + 1))
    inside = range(max(0, -(-first // step)), min(size, (final - inner) // step + 1))
    if inside:
        yield source.along(axis, inside), target.along(axis, inside)
    for index in touched:
        if index not in inside:
            one = range(index, index + 1)
            yield from parts_within(source.along(axis, one), target.along(axis, one), begin, end)
