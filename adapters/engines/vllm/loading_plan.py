"""Plans of how vLLM's loaders load each tensor of the trainer in this worker: which parts they copy, and to where.

A loader gets a stand-in without memory, and the copies that it makes of it are noted instead of made; they depend on
the tensor's name and shape alone. Afterwards a tensor need not be whole to be loaded: of a run of its elements, what
this worker wants is copied from where it lies.
Invariants: a tensor with which a loader does anything but copy parts of it, or set the rest of a parameter to a
number, has no plan, and takes vLLM's own way.
Does not own: what happens to a layer before and after it is loaded (`weight_receiver.py`).
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollgrad.adapters.weights.regions import Region

Place = tuple[Any, str]
"""A layer, and the name of a tensor of its own."""

CLONE = torch.ops.aten.clone.default
COPY = torch.ops.aten.copy_.default
SETS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

IN_A_DICT = IN_A_TENSOR = 2
"""References to a tensor that only a dictionary has, and to the storage of a tensor without views: each with the one
that is counted through."""

Kind = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, number format and shape of a tensor."""


@frozen
class Copy:
    """A copy from a part of the trainer's tensor to a part of a layer's; or `value`, of a part that has no source."""

    place: Place
    target: Region
    source: Region | None
    value: float = 0.0


@frozen
class Loading:
    """All that loading a tensor is; `copies` are None if vLLM's own loader has to do it."""

    copies: Sequence[Copy] | None
    loaded: frozenset[str] | None
    """Names of the parameters that it loads, or a part of them; None if the model does not name what it loads."""


@frozen(eq=False)
class _Made:
    """A tensor that a loader has made of a stand-in: its elements in another order, or a number in place of each."""

    name: str
    source: Region | None = None
    value: float = 0.0
    tensor: Tensor | None = None
    """Itself, where it has memory of its own, which so is no other's."""

    def is_all_of(self, tensor: Tensor) -> bool:
        """Returns whether a tensor in the same memory is all of it, as it was made."""
        return self.tensor is not None and Region.of(tensor) == Region.of(self.tensor)


@define
class LoadingPlan:
    """The plan of one model, learned tensor by tensor while its parameters have the shapes of a checkpoint.

    Args:
        model: vLLM's; `load_weights` loads tensors by name.
        deferred: whether a layer is one that vLLM loads only at the end, by itself.
        common: names of tensors that layers may have in common, and are loaded with any of them.
    """

    model: Any
    deferred: Callable[[Any], bool] = lambda layer: False
    common: Collection[str] = ()
    _known: dict[tuple[str, tuple[int, ...]], Loading] = field(factory=dict, init=False)

    def loading(self, name: str, shape: Iterable[int]) -> Loading:
        """Returns the plan of a tensor that was learned."""
        return self._known[name, tuple(shape)]

    def sources(self, layer: Any) -> Iterator[str]:
        """Yields the names of the learned tensors that are copied into a layer."""
        for (name, _), loading in self._known.items():
            if any(copy.place[0] is layer for copy in loading.copies or ()):
                yield name

    def unknown(self, tensors: Iterable[Kind]) -> list[Kind]:
        """Returns the tensors that are to be learned."""
        return [kind for kind in tensors if (kind[0], kind[2]) not in self._known]

    def learn(self, tensors: Sequence[Kind]) -> None:
        """Learns tensors, together if each can be told from the others, else one by one."""
        new = {kind[0]: kind for kind in tensors}.values()  # of a tensor there may be several pieces
        found = self._noted([*new])
        if found is None:
            found = {}
            for kind in new:
                found |= self._noted([kind]) or {kind[0]: Loading(None, frozenset())}
        self._known |= {(name, shape): found[name] for name, _, shape in new}

    def _noted(self, kinds: Sequence[Kind]) -> dict[str, Loading] | None:
        """Returns what the model's loaders do with tensors; None if that cannot be told."""
        try:
            with (notes := _Notes(self.model, kinds, self.deferred, self.common)):
                loaded = self.model.load_weights(notes.stand_ins())
        except Exception:  # of any kind: a loader that reads values finds none; nor has every tensor a storage
            return None
        return notes.result(loaded)


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of all copies from stand-ins to tensors of a model's layers; none of them is made."""

    def __init__(
        self, model: Any, kinds: Sequence[Kind], deferred: Callable[[Any], bool], common: Collection[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_ins = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in kinds}
        self._names = {memory_of(tensor): name for name, tensor in self._stand_ins.items()}
        self._made: dict[int, _Made] = {}
        self._owned: dict[int, _Owned | None] = {}
        for path, layer in model.named_modules():
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                if tensor is not None and not (name in common and memory_of(tensor) in self._owned):
                    own = _Owned((layer, name), f"{path}.{name}".removeprefix("."), tensor.storage_offset())
                    shared = memory_of(tensor) in self._owned
                    self._owned[memory_of(tensor)] = None if shared or deferred(layer) else own
        self._current = ""
        self._copies: dict[str, list[Copy]] = {name: [] for name in self._stand_ins}
        self._loaded: dict[str, set[str]] = {name: set() for name in self._stand_ins}
        self._clear = True
        """Whether loaders have done nothing but what can be noted."""

    def stand_ins(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the stand-ins; a loader that asks for the next has done with the last one, unless it collects all."""
        for name, tensor in self._stand_ins.items():
            self._current = name
            yield name, tensor

    def result(self, loaded: Iterable[str] | None) -> dict[str, Loading] | None:
        """Returns the notes of each tensor; None if loaders did something else, or claim to have loaded parameters that
        they did not copy to: nobody could tell from which tensor these come."""
        copied = set().union(*self._loaded.values())
        claimed = set(loaded or ()) - copied
        if not self._clear or (claimed and (len(self._stand_ins) > 1 or not copied)) or self._any_kept():
            return None
        names = {name: None if loaded is None else frozenset(own | claimed) for name, own in self._loaded.items()}
        return {name: Loading(copies, names[name]) for name, copies in self._copies.items()}

    def _any_kept(self) -> bool:
        """Returns whether a loader has kept a stand-in, or a part of one, to load it with another tensor."""
        return any(
            sys.getrefcount(self._stand_ins[name]) > IN_A_DICT
            or torch._C._storage_Use_Count(memory_of(self._stand_ins[name])) > IN_A_TENSOR
            for name in self._stand_ins
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Notes what writes to a layer's tensor, instead of doing it."""
        target = args[0] if args else None
        if not isinstance(target, Tensor) or memory_of(target) not in self._owned:
            made = func(*args, **(kwargs or {}))
            if isinstance(target, Tensor) and memory_of(target) in self._names:
                self._follow(func, target, made, *args[1:2])
            elif isinstance(target, Tensor) and func._schema.is_mutable:
                self._made.pop(memory_of(target), None)
            return made
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        own = self._owned[memory_of(target)]
        note = self._copied if func is COPY else self._set if func in SETS else None
        if own is None or note is None or not note(own, target, *args[1:2]):
            self._clear = False
        return target

    def _follow(self, func: Any, stand_in: Tensor, made: Tensor, value: float = 0.0) -> None:
        """Notes what a loader makes of a stand-in, or of a part of it, that another tensor's memory or its own has."""
        name = self._names[memory_of(stand_in)]
        if func is CLONE and memory_of(stand_in) not in self._made:
            self._made[memory_of(made)] = _Made(name, Region.of(stand_in), tensor=made)
        elif func in SETS and stand_in.numel() == self._stand_ins[name].numel():
            self._made[memory_of(stand_in)] = _Made(name, value=float(value))
        elif func._schema.is_mutable:
            self._clear = False

    def _copied(self, own: "_Owned", target: Tensor, source: Tensor) -> bool:
        """Notes a copy; returns whether it is one of a tensor's part as it is."""
        made = self._made.get(memory_of(source))
        name = self._names.get(memory_of(source)) if made is None else made.name
        if name is None or source.dtype != self._stand_ins[name].dtype:
            return False
        region = Region.of(source.expand(target.shape))
        if made is not None and made.source is None:
            copy = Copy(own.place, own.region(target), None, made.value)
        elif made is None or (made.is_all_of(source) and region == Region.of(source)):
            copy = Copy(own.place, own.region(target), region if made is None else made.source)
        else:
            return False
        if target.numel():
            self._copies[name].append(copy)
        self._loaded[name].add(own.parameter)
        return True

    def _set(self, own: "_Owned", target: Tensor, value: float = 0.0) -> bool:
        """Notes that a part of a parameter becomes a number; returns whether it is known for which tensor."""
        copies = self._copies[self._current]
        if target.numel():
            copies.append(Copy(own.place, own.region(target), None, float(value)))
        return len(copies) > 1 or len(self._stand_ins) == 1 or not target.numel()


@frozen
class _Owned:
    """A layer's tensor: its place, its name in the model, and where it begins in its memory."""

    place: Place
    parameter: str
    begin: int

    def region(self, part: Tensor) -> Region:
        """Returns where a part of the tensor lies in it."""
        region = Region.of(part)
        return Region(region.offset - self.begin, region.shape, region.strides)


def memory_of(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)
