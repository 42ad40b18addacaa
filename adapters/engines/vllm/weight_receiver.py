"""The end of the weight channel in vLLM's workers: it reads tensors in shared memory, or in files, and loads them
(`layer_loading.py`), or what changed in them (`layer_changes.py`).

A worker reads of each tensor what its share of the model has of it: with tensor parallelism, a part.
"""

import json
import mmap
from collections.abc import Mapping
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


class _Receiver:
    """Takes buckets of shared memory, or files, in one worker; `model`, its settings and `device` are of vLLM's base
    class."""

    model: Any
    model_config: Any
    parallel_config: Any
    device: torch.device

    init_info_cls = ReceiverSettings
    update_info_cls = FullBucket

    _begun = False
    _loading: Any = None
    _has: str | None = None
    """Key of the transfer whose weights the model has; None if it has none, or not wholly."""
    _comes: str | None = None
    """Key of the transfer that has begun."""

    def init_transfer_engine(self, init_info: ReceiverSettings) -> None:
        """Maps the trainer's memory."""
        self._memory = SharedMemory(init_info.path, bucket_bytes=init_info.bucket_bytes)

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded as from a checkpoint: they hold repacked weights otherwise."""
        if self._begun:  # a transfer that broke off
            self.finish_weight_update()
        if self._loading is None or self._loading.model is not self.model:
            # Quantised layers are made from whole tensors; balanced experts move, and a plan would not know.
            planned = self.model_config.quantization is None and not self.parallel_config.enable_eplb
            self._loading = LayerChanges(self.model, self.device, planned=planned)
        self._begun, self._complete, self._changing, self._comes = True, False, False, None
        kept = {name for name, _ in self.model.named_parameters()}
        self._loading.begin()
        # Of these, checkpoints have no matrices that latent attention takes out of its weights.
        self._lacking = kept & {name for name, _ in self.model.named_parameters()}

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
        memory, pieces = self._contents(update_info)
        loaded = self._loading.take(memory, pieces)
        self._lacking -= self._lacking if loaded is None else loaded  # a model that names nothing checks for itself
        quantized = self.model_config.quantization is not None  # its scales are made here, not sent
        if update_info.last:
            lacking = [] if quantized else [*sorted(self._lacking), *self._loading.lacking()]
            if lacking or not self._loading.whole():
                more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
                raise ValueError(f"these parameters did not come from the trainer: {lacking[:NAMED]}{more}")
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

    def finish_weight_update(self) -> None:
        """Repacks the loaded layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._loading.end(well=self._complete)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        self._begun, self._has = False, self._comes if self._complete else None

    def shutdown(self) -> None:
        """Does nothing: the memory is freed with the process."""


def receiver_class() -> type:
    """Returns the class of which vLLM's factory makes an object in each worker: with vLLM's base class, which needs its
    import."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return type("Receiver", (_Receiver, WeightTransferEngine), {})


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
