"""The end of the weight channel in vLLM's workers: it reads tensors in shared memory, in files, or in a GPU's memory,
and loads them (`layer_loading.py`), or what changed in them (`layer_changes.py`).

A worker reads of each tensor what its share of the model has of it: with tensor parallelism, a part. What comes to a
GPU comes by vLLM's own backends; only its reloading, in which weights that a model copies without a loader are lost
(experts of gpt-oss), is not used.
"""

import json
import mmap
from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from rollgrad.adapters.engines.vllm.layer_changes import LayerChanges
from rollgrad.adapters.weights.gpu_buckets import dtype_name
from rollgrad.adapters.weights.shared_buckets import Piece, SharedMemory

NAMED = 8
"""Largest number of missing parameters that an error names."""


@define
class ReceiverSettings:
    """Message of the trainer before all buckets: the path of the shared memory, and the bytes of a bucket."""

    path: str
    bucket_bytes: int


@define
class FullBucket:
    """Message of the trainer about each bucket: its index and contents, or its file; with neither, that it was the
    last."""

    bucket: int = 0
    pieces: list[Piece] = field(factory=list)
    shard: str | None = None
    last: bool = False
    base: str | None = None
    """Key of the transfer on which a transfer of changes builds; None of one of all weights."""
    key: str | None = None
    """Key of this transfer; None if none of changes follows it."""


class _Loads:
    """Loads weights into one worker's model; `model`, its settings and `device` are of vLLM's base class."""

    model: Any
    model_config: Any
    parallel_config: Any
    device: torch.device

    _begun = False
    _loading: Any = None
    _has: str | None = None
    """Key of the transfer whose weights the model has; None if it has none, or not wholly."""
    _comes: str | None = None
    """Key of the transfer that has begun."""

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded as from a checkpoint: they hold repacked weights otherwise."""
        if self._begun:  # a transfer that broke off
            self._end()
        if self._loading is None or self._loading.model is not self.model:
            # Quantised layers are made from whole tensors; balanced experts move, and a plan would not know.
            planned = self.model_config.quantization is None and not self.parallel_config.enable_eplb
            self._loading = LayerChanges(self.model, self.device, planned=planned)
        self._begun, self._complete, self._changing, self._comes = True, False, False, None
        kept = {name for name, _ in self.model.named_parameters()}
        self._loading.begin()
        # Of these, checkpoints have no matrices that latent attention takes out of its weights.
        self._lacking = kept & {name for name, _ in self.model.named_parameters()}

    def finish_weight_update(self) -> None:
        """Repacks the loaded layers."""
        self._end()

    def _take(self, memory: Tensor, pieces: list[Piece]) -> None:
        """Loads the pieces of tensors in `memory`."""
        loaded = self._loading.take(memory, pieces)
        self._lacking -= self._lacking if loaded is None else loaded  # a model that names nothing checks for itself

    def _check(self) -> None:
        """Raises `ValueError` if a parameter did not come or was cut short."""
        quantized = self.model_config.quantization is not None  # its scales are made here, not sent
        lacking = [] if quantized else [*sorted(self._lacking), *self._loading.lacking()]
        if lacking or not self._loading.whole():
            more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
            raise ValueError(f"these parameters did not come from the trainer: {lacking[:NAMED]}{more}")

    def _end(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._loading.end(well=self._complete)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        self._begun, self._has = False, self._comes if self._complete else None


class _Receiver(_Loads):
    """Takes buckets of shared memory, or files."""

    init_info_cls = ReceiverSettings
    update_info_cls = FullBucket

    def init_transfer_engine(self, init_info: ReceiverSettings) -> None:
        """Maps the trainer's memory."""
        self._memory = SharedMemory(init_info.path, bucket_bytes=init_info.bucket_bytes)

    def receive_weights(self, update_info: FullBucket) -> None:
        """Loads the contents of a bucket or a file.

        Raises:
            ValueError: it was the last, and a parameter did not come or was cut short, or could not be changed by
            the transfers to come; or it has changes of weights that are not here.
        """
        if update_info.base is not None:
            self._change(update_info)
            return
        self._loading.keeps, self._has, self._comes = update_info.key is not None, None, update_info.key
        self._take(*self._contents(update_info))
        if update_info.last:
            self._check()
            if self._loading.keeps and (fixed := sorted(self._loading.unchangeable())):
                raise ValueError(
                    "vLLM computes something from these tensors when it loads them, so that their changes alone "
                    f"cannot be loaded: {fixed[:NAMED]}; leave --vllm.sync_delta out"
                )
            self._complete = True

    def _change(self, update: FullBucket) -> None:
        """Changes the model by the contents of a bucket or a file."""
        if not self._changing:
            if self._has != update.base:
                raise ValueError(
                    f"changes of the weights of transfer {update.base} came, but here are those of {self._has}"
                )
            self._changing, self._has, self._comes = True, None, update.key
        self._loading.change(*self._contents(update))
        if update.last:
            if not self._loading.whole():
                raise ValueError("changes of weights came incomplete from the trainer")
            self._complete = True

    def _contents(self, update: FullBucket) -> tuple[Tensor, list[Piece]]:
        if update.shard is not None:
            return read_shard(update.shard)
        return self._memory.bucket(update.bucket) if update.pieces else torch.empty(0), update.pieces

    def shutdown(self) -> None:
        """Does nothing: the memory is freed with the process."""


class _GPUReceiver(_Loads):
    """Takes buckets that lie in the memory of the worker's GPU."""

    def receive_weights(self, update_info: Any) -> None:
        """Loads the contents of a bucket: tensors end to end, by their names, formats and shapes."""
        pieces, end = list[Piece](), 0
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            size = prod(shape) * getattr(torch, dtype).itemsize
            pieces.append(Piece(name=name, dtype=dtype, shape=shape, begin=0, offset=end, size=size))
            end += size
        self._take(self._bucket(update_info, end), pieces)

    @abstractmethod
    def _bucket(self, update_info: Any, size: int) -> Tensor:
        """Returns the bytes of a bucket, uint8."""

    def finish_weight_update(self) -> None:
        """Repacks the loaded layers, which are as they were if not all came.

        Raises:
            ValueError: a parameter did not come; the transfer is over then, and may be ended again.
        """
        if not self._begun:
            return
        try:
            self._check()
            self._complete = True
        finally:
            self._end()


class _IPCReceiver(_GPUReceiver):
    """Reads the trainer's bucket in their common GPU."""

    _packed_importer: Any

    def _bucket(self, update_info: Any, size: int) -> Tensor:
        index = self.device.index
        gpu = str(torch.cuda.get_device_properties(index).uuid)
        if gpu not in update_info.ipc_handles:
            raise ValueError(f"the trainer has no bucket on GPU {gpu}, but on {sorted(update_info.ipc_handles)}")
        handle = [*update_info.ipc_handles[gpu]]
        handle[6] = index  # this GPU's number here; the trainer's process may number it differently
        mapped: Tensor = self._packed_importer.rebuild(handle)
        return mapped[:size]

    def finish_weight_update(self) -> None:
        """Repacks the loaded layers, like `_GPUReceiver.finish_weight_update`, and gives the trainer's memory back."""
        try:
            super().finish_weight_update()
        finally:
            self._packed_importer.close()


class _NCCLReceiver(_GPUReceiver):
    """Takes part in the trainer's broadcast of a bucket."""

    model_update_group: Any

    def _bucket(self, update_info: Any, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.model_update_group.broadcast(memory, src=0, stream=torch.cuda.current_stream())
        return memory


def receiver_class() -> type:
    """Returns the class of which vLLM's factory makes an object in each worker: with vLLM's base class, which needs its
    import."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return type("Receiver", (_Receiver, WeightTransferEngine), {})


def gpu_receiver_class(backend: str) -> type | None:
    """Returns the class that takes vLLM's place for its backends `ipc` and `nccl`, whose ways of a bucket it has; None
    for others."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        return type("IPCReceiver", (_IPCReceiver, IPCWeightTransferEngine), {})
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        return type("NCCLReceiver", (_NCCLReceiver, NCCLWeightTransferEngine), {})
    return None


def read_shard(path: str) -> tuple[Tensor, list[Piece]]:
    """Returns the bytes of a file of safetensors, which are read when they are used, and the tensors in it.

    Raises:
        FileNotFoundError: it is not on this machine.
    """
    from safetensors.torch import _TYPES

    formats: Mapping[str, Any] = _TYPES  # number formats by their names in files

    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is not on the engine's machine: with --vllm.sync_backend disk, --ckpt.output_dir is on a file "
            "system that all machines share"
        ) from error
    data = 8 + int.from_bytes(memory[:8], "little")  # a number of 8 bytes, so many of JSON, and then the tensors
    pieces = []
    for name, entry in json.loads(memory[8:data]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            dtype = dtype_name(formats[entry["dtype"]])
            pieces.append(
                Piece(name=name, dtype=dtype, shape=entry["shape"], begin=0, offset=data + first, size=end - first)
            )
    return torch.frombuffer(memory, dtype=torch.uint8), pieces


def _repack_tied(model: Any) -> None:
    """Lets layers whose weight is another layer's compute with it. They load no weights, so vLLM does not repack them,
    and on a CPU their product would still use the packed copy of the old weights."""
    owners: dict[int, Any] = {}
    for layer in model.modules():
        weight, method = layer._parameters.get("weight"), getattr(layer, "quant_method", None)
        if weight is None or method is None:
            continue
        owner = owners.setdefault(id(weight), layer)
        if owner is layer:
            continue
        if type(owner.quant_method) is type(method) and hasattr(owner, "cpu_linear"):
            layer.cpu_linear = owner.cpu_linear  # the product with the packed weight, which needs no second copy
        else:
            method.process_weights_after_loading(layer)
