"""A GPU's streams that are none: operations are computed at once on the CPU, and refused where a GPU could compute them
too early. What one stream has made another may use only after it has waited for it, and memory may be freed only when
the stream that it was allocated in has waited for all that uses it: torch's allocator gives it to what that stream
does next. Pinned memory is freed at any time, as by torch, whose allocator knows of the copies.

Each stream has a vector clock (Lamport 1978; Fidge 1988), by which an access is ordered after another or not.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import Factory, define
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten

Clock = dict[int, int]
"""How many operations of each stream are known to have ended."""


@define(eq=False)
class Memory:
    """A tensor's memory: where it was allocated, and who has written and read it."""

    home: "Stream | None"
    write: tuple[int, int] | None = None
    reads: Clock = Factory(dict)


class Stream:
    """A stream, which knows what it has waited for."""

    def __init__(self, device: Any = None) -> None:
        self.known: Clock = {id(self): 0}

    def record_event(self) -> Clock:
        """Returns what has ended when the event has."""
        return dict(self.known)

    def wait_event(self, event: Clock) -> None:
        """Waits for an event."""
        for stream, count in event.items():
            self.known[stream] = max(self.known.get(stream, 0), count)

    def wait_stream(self, other: "Stream") -> None:
        """Waits for all that another stream was told so far."""
        self.wait_event(other.record_event())

    def knows(self, stream: int, count: int) -> bool:
        """Whether so many operations of a stream have ended before what comes next in this one."""
        return self.known.get(stream, 0) >= count


class StrictStreams(TorchDispatchMode):
    """Takes the place of `torch.cuda`; inside of its block all operations are a GPU's. What was refused where no error
    could be raised is in `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.Stream = Stream
        self._current = self._computing = Stream()
        self._memory: dict[int, Memory] = {}
        self.refused: list[str] = []
        self.copies = 0
        """Operations in other streams than the one that computes."""

    def current_stream(self, device: Any = None) -> Stream:
        """Returns the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the current one inside the block."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = bool(kwargs.pop("pin_memory", False))  # torch without CUDA has no such memory
        stream = self._current
        stream.known[id(stream)] += 1
        self.copies += stream is not self._computing
        made = func(*args, **kwargs)
        written = {
            id(value)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in given:
            self._use(func, tensor, stream, writes=id(tensor) in written)
        old = {x.untyped_storage()._cdata for x in given}
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in old:
                self._use(func, tensor, stream, writes=True, home=None if pinned else stream)
        return made

    def _use(self, func: Any, tensor: Tensor, stream: Stream, *, writes: bool, home: Stream | None = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(home)
            weakref.finalize(storage, self._free, key)
        memory = self._memory[key]
        for other, count in self._before(memory, writes=writes):
            if not stream.knows(other, count):
                raise AssertionError(f"{func} does not wait for what another stream does with its {[*tensor.shape]}")
        if writes:
            memory.write, memory.reads = (id(stream), stream.known[id(stream)]), {}
        else:
            memory.reads[id(stream)] = stream.known[id(stream)]

    def _before(self, memory: Memory, *, writes: bool) -> Iterator[tuple[int, int]]:
        """Yields the uses that a use must come after."""
        if memory.write is not None:
            yield memory.write
        if writes:
            yield from memory.reads.items()

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.home is None:
            return
        for other, count in self._before(memory, writes=True):
            if not memory.home.knows(other, count):
                self.refused.append("memory is freed while another stream uses it")
