"""Changes parts of the layers of a model of vLLM, from the positions and values of what changed in the trainer's
tensors since the last transfer (`adapters.weights.delta`).

What a layer's kernels read is changed where it is, if it is what was loaded. A layer whose kernels read something else,
such as weights packed for a CPU, or experts in an order of their own, is kept on the CPU as it was loaded, changed
there, loaded again from there, and packed anew.
Invariants: afterwards layers hold the bits that loading all tensors would give them.
Does not own: which transfer changes build on (`weight_receiver.py`).
"""

from collections.abc import Iterator
from typing import Any

from attrs import define, field
from torch import Tensor

from rollgrad.adapters.engines.vllm.layer_loading import LayerLoading, stays_as_loaded
from rollgrad.adapters.engines.vllm.loading_plan import Copy
from rollgrad.adapters.weights.delta import POSITIONS, VALUES, positions_of
from rollgrad.adapters.weights.regions import elements_within
from rollgrad.adapters.weights.shared_buckets import Assembler, Piece


@define
class LayerChanges(LayerLoading):
    """A `LayerLoading` whose layers may also be changed: after a transfer of all weights with `keeps`, by `change`
    instead of `take`."""

    keeps: bool = False
    """Whether a transfer of changes may follow this one."""
    _kept: dict[Any, dict[str, Tensor]] = field(factory=dict, init=False)
    """Layers as they were loaded, on the CPU, whose kernels read something else."""
    _shapes: dict[str, tuple[int, ...]] = field(factory=dict, init=False)
    """Shapes of the trainer's tensors."""
    _changes: Assembler = field(init=False)
    _halves: dict[str, Tensor] = field(factory=dict, init=False)
    """Positions whose values have not come, and values whose positions have not: files have them in any order."""
    _changing: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Gives all layers the shapes of a checkpoint."""
        super().begin()
        self._changes = Assembler(self.device)
        self._halves, self._changing = {}, False

    def whole(self) -> bool:
        """Returns whether no tensor, and no change of one, is incomplete."""
        return super().whole() and self._changes.whole() and not self._halves

    def take(self, memory: Tensor, pieces: list[Piece]) -> set[str] | None:
        """Loads the pieces in `memory`, like `LayerLoading.take`."""
        self._shapes |= {piece["name"]: tuple(piece["shape"]) for piece in pieces}
        return super().take(memory, pieces)

    def unchangeable(self) -> Iterator[str]:
        """Yields the names of tensors that came and of which no part can be changed, because a loader of vLLM does
        anything with them but copy each element once."""
        for name in self._came:
            loading = self._plan.loading(name, self._shapes[name]) if self.planned else None
            copies = None if loading is None else loading.copies
            if copies is None or not all(copy.source is None or copy.source.nested() for copy in copies):
                yield name

    def change(self, memory: Tensor, pieces: list[Piece]) -> None:
        """Changes layers by the pieces in `memory`: of whole tensors, of positions and of values."""
        self._changing = True
        whole = [piece for piece in pieces if not piece["name"].startswith((POSITIONS, VALUES))]
        for piece in whole:
            self._replace(memory, piece)
        parts = [piece for piece in pieces if piece["name"].startswith((POSITIONS, VALUES))]
        for half, tensor in self._changes.take(memory, parts):
            self._halves[half] = tensor
            name = half.removeprefix(POSITIONS).removeprefix(VALUES)
            if {POSITIONS + name, VALUES + name} <= self._halves.keys():
                self._set(name, positions_of(self._halves.pop(POSITIONS + name)), self._halves.pop(VALUES + name))

    def end(self, *, well: bool) -> None:
        """Ends loading, like `LayerLoading.end`; layers that have changed are packed anew, others get back what their
        kernels had."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        if self._changing and well:
            for layer in [layer for layer, in_place in self._open.items() if not in_place]:
                self._prepare(layer, get_layerwise_info(layer))
                for name, tensor in self._kept[layer].items():
                    getattr(layer, name).data.copy_(tensor)
        super().end(well=well)
        for layer in self.model.modules() if self._changing else ():
            info = get_layerwise_info(layer)
            if info.can_load() and not is_deferred_attention_layer(layer):
                _place_kernel_tensors(layer, info)
                info.reset()

    def _complete(self, layer: Any, info: Any) -> None:
        """Repacks a layer that is loaded, and keeps it as it is before."""
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        if not self.keeps:
            self._kept.pop(layer, None)
        elif not self._open[layer] and not self._changing:
            loaded = {**layer._parameters, **layer._buffers}
            self._kept[layer] = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in loaded.items()
                if tensor is not None and not tensor.is_meta and name not in SKIP_LOAD_TENSORS
            }
        super()._complete(layer, info)

    def _replace(self, memory: Tensor, piece: Piece) -> None:
        """Copies what this worker wants of a whole tensor's piece."""
        loading = self._plan.loading(piece["name"], piece["shape"])
        for copy, parts in self._wanted(memory, piece, loading):
            for source, target in parts:
                if source is not None:
                    target.view(self._changeable(copy)).copy_(source)

    def _set(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Sets the elements of a tensor at `positions`."""
        for copy in self._plan.loading(name, self._shapes[name]).copies or ():
            if copy.source is None:
                continue
            found, places = elements_within(copy.source, copy.target, positions)
            if len(found):
                tensor = self._changeable(copy)
                memory = tensor.as_strided((copy.target.last() + 1,), (1,), tensor.storage_offset())
                memory[places.to(tensor.device)] = values[found].to(tensor.device, tensor.dtype)

    def _changeable(self, copy: Copy) -> Tensor:
        """Returns the tensor of a layer that a copy goes to, where it can be changed."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        layer, name = copy.place
        if name in SKIP_LOAD_TENSORS:  # vLLM leaves these tensors where kernels read them
            unmoved: Tensor = getattr(layer, name).data
            return unmoved
        if layer not in self._open:
            info = get_layerwise_info(layer)
            in_place = stays_as_loaded(layer, info)
            self._open[layer] = in_place and self._prepare(layer, info)
        tensor: Tensor = getattr(layer, name).data if self._open[layer] else self._kept[layer][name]
        return tensor
