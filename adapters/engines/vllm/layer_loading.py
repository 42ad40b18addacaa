"""Loads the layers of a model of vLLM from runs of the trainer's tensors, each of which is read as far as this worker
wants it.

vLLM's layers hold what their kernels read, which may be repacked weights. Its own reloading (`model_loader.reload`)
gives a layer the tensors of a checkpoint again, repacks them when all have come, and copies the result to where the
kernels expect it. This does the same, with two differences: tensors that a plan knows (`loading_plan.py`) are copied
once, straight from where they lie, and layers that nothing repacks are written in place.
Invariants: each element that this worker holds is written by one copy; no tensor of the trainer is put together, but
for those without a plan, which take vLLM's own way.
Does not own: where the runs come from, nor whether the engine may serve (`engine.py`): a transfer that broke off leaves
layers of two versions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollgrad.adapters.engines.vllm.loading_plan import COPY, Copy, Loading, LoadingPlan, Place, memory_of
from rollgrad.adapters.weights.regions import Region, parts_within
from rollgrad.adapters.weights.shared_buckets import Assembler, Piece


@define
class LayerLoading:
    """The layers of `model` between `begin` and `end`.

    Args:
        model: vLLM's.
        device: where it computes.
        planned: whether tensors may have plans; otherwise all take vLLM's own way.
    """

    model: Any
    device: torch.device
    planned: bool
    _plan: LoadingPlan = field(init=False)
    _assembler: Assembler = field(init=False)
    _missing: dict[str, int] = field(factory=dict, init=False)
    """Bytes of each incomplete tensor with a plan that have not come."""
    _open: dict[Any, bool] = field(factory=dict, init=False)
    """Layers that have been written to and are not complete; whether they are written where their kernels read."""
    _direct: dict[Place, int] = field(factory=dict, init=False)
    """Elements that vLLM's own loaders have copied to each tensor of layers that are written where their kernels
    read."""
    _came: set[str] = field(factory=set, init=False)
    """Names of the tensors of which a piece has come."""

    def __attrs_post_init__(self) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        self._plan = LoadingPlan(self.model, is_deferred_attention_layer, SKIP_LOAD_TENSORS)
        self._assembler = Assembler(self.device)
        if self.device.type == "cpu":
            _repack_experts(self.model)

    def begin(self) -> None:
        """Gives all layers the shapes of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._assembler = Assembler(self.device)
        self._missing, self._open, self._direct, self._came = {}, {}, {}, set()
        initialize_layerwise_reload(self.model)

    def whole(self) -> bool:
        """Returns whether no tensor is incomplete."""
        return self._assembler.whole() and not any(self._missing.values())

    def take(self, memory: Tensor, pieces: list[Piece]) -> set[str] | None:
        """Loads the pieces in `memory`, bytes that may be overwritten afterwards.

        Returns:
            Names of the parameters that are loaded now; None if the model does not name them.
        """
        self._came.update(piece["name"] for piece in pieces)
        if not self.planned:
            return self._take_whole(memory, pieces)
        kinds = ((piece["name"], getattr(torch, piece["dtype"]), tuple(piece["shape"])) for piece in pieces)
        if unknown := self._plan.unknown(kinds):
            with _original_loaders(self.model):
                self._plan.learn(unknown)
        loaded: set[str] | None = set()
        unplanned = []
        for piece in pieces:
            loading = self._plan.loading(piece["name"], piece["shape"])
            if loading.copies is None:
                unplanned.append(piece)
                continue
            self._take_parts(memory, piece, loading)
            loaded = _together(loaded, loading.loaded)
        return _together(loaded, self._take_whole(memory, unplanned)) if unplanned else loaded

    def lacking(self) -> Iterator[str]:
        """Yields what has not come of layers of which a part has: the trainer's tensors, as far as their names follow
        from those of the others in the layer, else the layer. Rows that fill a vocabulary up lack always."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        joined: Mapping[str, Sequence[str]] = getattr(self.model, "packed_modules_mapping", {})
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or not 0 < info.load_numel < info.load_numel_total - _made_here(layer):
                continue
            if isinstance(layer, VocabParallelEmbedding) or is_deferred_attention_layer(layer):
                continue
            parts = joined.get(path.rpartition(".")[2], ())
            came = [name.split(".") for name in self._plan.sources(layer) if name in self._came]
            wanted = {".".join((*words[:-2], part, words[-1])) for words in came for part in parts}
            yield from sorted(wanted - self._came) or (f"a part of {path}",)

    def end(self, *, well: bool) -> None:
        """Ends the loading of layers of which not all elements have come, before vLLM's own reloading ends: those that
        lack padding alone are repacked; if the transfer broke off, they keep what their kernels had."""
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in list(self._open):
            info = get_layerwise_info(layer)
            if not info.can_load():
                continue
            if well:
                self._complete(layer, info)
            else:
                _place_kernel_tensors(layer, info)
                info.reset()
        self._open = {}

    def _take_whole(self, memory: Tensor, pieces: list[Piece]) -> set[str] | None:
        """Loads, by vLLM's own loaders, the tensors that pieces complete. Writes of these loaders to the memory that
        kernels read are counted here, because vLLM does not count them."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        with _CopyCounter([layer for layer, in_place in self._open.items() if in_place]) as counter:
            loaded: set[str] | None = self.model.load_weights(self._assembler.take(memory, pieces))
        for (layer, name), copied in counter.copied.items():
            info, before = get_layerwise_info(layer), self._direct.get((layer, name), 0)
            if not info.can_load():
                continue
            # A loader may copy twice: what has come, and then what it makes of that.
            self._direct[layer, name] = min(getattr(layer, name).numel(), before + copied)
            info.load_numel += self._direct[layer, name] - before
            if info.load_numel >= info.load_numel_total:
                self._complete(layer, info)
        return loaded

    def _take_parts(self, memory: Tensor, piece: Piece, loading: Loading) -> None:
        """Copies what this worker wants of a piece."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        for copy, parts in self._wanted(memory, piece, loading):
            layer, name = copy.place
            info = get_layerwise_info(layer)
            counts = name not in SKIP_LOAD_TENSORS  # those that vLLM leaves where kernels read them
            if counts and not info.can_load():  # vLLM, too, leaves out what comes after all of a layer has come
                continue
            if counts and layer not in self._open:
                self._open[layer] = self._prepare(layer, info)
            tensor = getattr(layer, name).data
            for source, target in parts:
                if source is None:
                    target.view(tensor).fill_(copy.value)
                else:
                    target.view(tensor).copy_(source)
            if counts:
                info.load_numel += sum(prod(target.shape) for _, target in parts)
                if info.load_numel >= info.load_numel_total:
                    self._complete(layer, info)

    def _wanted(
        self, memory: Tensor, piece: Piece, loading: Loading
    ) -> Iterator[tuple[Copy, list[tuple[Tensor | None, Region]]]]:
        """Yields the copies that a piece has elements of, with these and where they go; notes that the piece came."""
        dtype = getattr(torch, piece["dtype"])
        run = memory[piece["offset"] : piece["offset"] + piece["size"]].view(dtype)
        begin = piece["begin"] // dtype.itemsize
        missing = self._missing.setdefault(piece["name"], prod(piece["shape"]) * dtype.itemsize)
        self._missing[piece["name"]] = missing - piece["size"]
        for copy in loading.copies or ():
            parts = [
                (None if source is None else source.view(run, begin), target)
                for source, target in _parts(copy, begin, begin + len(run))
            ]
            if parts:
                yield copy, parts

    def _prepare(self, layer: Any, info: Any) -> bool:
        """Gives a layer memory to be loaded into; returns whether it is where its kernels read."""
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        in_place = stays_as_loaded(layer, info)
        if in_place:
            layer._parameters.update(info.kernel_tensors[0])
            layer._buffers.update({name: info.kernel_tensors[1][name] for name in _filled(layer._buffers)})
        materialize_layer(layer, info)
        return in_place

    def _complete(self, layer: Any, info: Any) -> None:
        """Repacks a layer that is loaded."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader.reload.layerwise import (
            _get_original_loader,
            _layerwise_process,
            _place_kernel_tensors,
        )

        if not self._open.pop(layer) or info.loaded_weights:
            _layerwise_process(layer, info)
            return
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if hasattr(tensor, "weight_loader"):  # the loader of a bias was wrapped
                tensor.weight_loader = _get_original_loader(tensor)
        _place_kernel_tensors(layer, info)
        info.reset()
        if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(layer)


class _CopyCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are copied to each tensor of some layers, as vLLM counts those of the others."""

    def __init__(self, layers: Iterable[Any]) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _get_weight_loader

        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {
            memory_of(tensor): (layer, name)
            for layer in layers
            for name, tensor in _filled({**layer._parameters, **layer._buffers}).items()
            if _get_weight_loader(tensor) is _get_original_loader(tensor)
        }
        self.copied: dict[Place, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Counts a copy, and makes it."""
        place = self._places.get(memory_of(args[0])) if func is COPY else None
        if place is not None:
            self.copied[place] = self.copied.get(place, 0) + args[0].numel()
        return func(*args, **(kwargs or {}))


def _parts(copy: Copy, begin: int, end: int) -> Iterator[tuple[Region | None, Region]]:
    """Yields what the elements of a tensor from `begin` to before `end` have of a copy: regions of source and target; a
    part that becomes a number does with the tensor's first element."""
    if copy.source is not None:
        yield from parts_within(copy.source, copy.target, begin, end)
    elif not begin:
        yield None, copy.target


def _repack_experts(model: Any) -> None:
    """Packs the experts of a mixture for a CPU's kernel each time that they are loaded. vLLM packs those that are not
    quantised only when it makes the kernel, which would read later weights as if they were packed."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.process_weights_after_loading = partial(_pack_anew, method, method.process_weights_after_loading)


def _pack_anew(method: Any, process: Callable[[Any], None], layer: Any) -> None:
    """Does what vLLM does with the loaded experts of a layer for which there is no kernel."""
    method.moe_kernel = None
    process(layer)


def stays_as_loaded(layer: Any, info: Any) -> bool:
    """Returns whether what a layer's kernels read is what is loaded: its method is one that changes nothing, unless it
    changes the shape, and the memory is there; nor does a part of it wait."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if info.loaded_weights:  # loaded weights wait until the layer is complete
        return False
    if type(method) not in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return False
    loaded, buffers = _filled(layer._parameters), _filled(layer._buffers)
    kept, kept_buffers = info.kernel_tensors
    # Kernels may have made further buffers for themselves.
    if loaded.keys() != kept.keys() or not buffers.keys() <= kept_buffers.keys():
        return False
    kernel = {**kept, **kept_buffers}
    return all(_alike(tensor, kernel[name]) for name, tensor in {**loaded, **buffers}.items())


def _made_here(layer: Any) -> int:
    """Returns how many numbers of a layer vLLM's reloading counts that no checkpoint has."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    own = layer._non_persistent_buffers_set - SKIP_LOAD_TENSORS
    return sum(tensor.numel() for name, tensor in _filled(layer._buffers).items() if name in own)


def _filled(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@contextmanager
def _original_loaders(model: Any) -> Iterator[None]:
    """Lets the layers' loaders load inside the block, instead of keeping what they get until a layer is complete."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    tensors = [
        tensor for layer in model.modules() for tensor in (*layer._parameters.values(), *layer._buffers.values())
    ]
    wrapped = [(tensor, tensor.weight_loader) for tensor in tensors if hasattr(tensor, "weight_loader")]
    for tensor, _ in wrapped:
        tensor.weight_loader = _get_original_loader(tensor)
    try:
        yield
    finally:
        for tensor, loader in wrapped:
            tensor.weight_loader = loader


def _together(one: Iterable[str] | None, other: Iterable[str] | None) -> set[str] | None:
    """Returns all names; None if they cannot be known."""
    return None if one is None or other is None else {*one, *other}
