"""The end of the weight channel in vLLM's workers: it copies tensors from shared memory, or reads them from files, and
loads them.

vLLM fuses layers (query, key and value into one), and keeps the tensors of a fused layer until all its parts are there.
So a tensor is copied out of its bucket, which the next one overwrites: a part that vLLM still kept would change.
"""

from collections.abc import Iterable
from typing import Any

from attrs import define, field
from torch import Tensor

from rollgrad.adapters.weights.shared_buckets import Assembler, Piece, SharedMemory


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


def receiver_class() -> type:
    """Returns the class of which vLLM's factory makes an object in each worker. It is made in a function because the
    base class needs vLLM's import."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class Receiver(WeightTransferEngine):  # type: ignore[misc]
        """Takes buckets of shared memory, or files, in one worker."""

        init_info_cls = ReceiverSettings
        update_info_cls = FullBucket

        _begun = False

        def init_transfer_engine(self, init_info: ReceiverSettings) -> None:
            """Maps the trainer's memory."""
            self._memory = SharedMemory(init_info.path, bucket_bytes=init_info.bucket_bytes)

        def start_weight_update(self) -> None:
            """Makes the layers ready to be loaded as from a checkpoint: they hold repacked weights otherwise."""
            if self._begun:  # a transfer that broke off
                self.finish_weight_update()
            self._assembler = Assembler(self.device)
            self._lacking = {name for name, _ in self.model.named_parameters()}
            self._begun = True
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: FullBucket) -> None:
            """Loads the tensors that a bucket completes.

            Raises:
                ValueError: it was the last, and a parameter did not come or was cut short.
            """
            loaded = self.model.load_weights(self._tensors(update_info))
            self._lacking -= self._lacking if loaded is None else loaded  # a model that names nothing checks for itself
            quantized = self.model_config.quantization is not None  # its scales are made here, not sent
            if update_info.last and ((self._lacking and not quantized) or not self._assembler.whole()):
                raise ValueError(f"these parameters did not come from the trainer: {sorted(self._lacking)[:8]}")

        def _tensors(self, update: FullBucket) -> Iterable[tuple[str, Tensor]]:
            if update.shard is not None:
                return read_shard(update.shard, str(self.device))
            if not update.pieces:
                return ()
            return self._assembler.take(self._memory.bucket(update.bucket), update.pieces)

        def finish_weight_update(self) -> None:
            """Repacks the loaded layers."""
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied(self.model)
            self._begun = False

        def shutdown(self) -> None:
            """Does nothing: the memory is freed with the process."""

    return Receiver


def read_shard(path: str, device: str) -> Iterable[tuple[str, Tensor]]:
    """Returns the tensors of a file.

    Raises:
        FileNotFoundError: it is not on this machine.
    """
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device).items()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is not on the engine's machine: with --vllm.sync_backend disk, --ckpt.output_dir is on a file "
            "system that all machines share"
        ) from error


def _repack_tied(model: Any) -> None:
    """Repacks layers whose weight is another layer's. They load no weights, so vLLM does not repack them, and on a CPU
    their product would still use the packed copy of the old weights."""
    seen: set[int] = set()
    for layer in model.modules():
        weight, method = layer._parameters.get("weight"), getattr(layer, "quant_method", None)
        if weight is not None and method is not None:
            if id(weight) in seen:
                method.process_weights_after_loading(layer)
            seen.add(id(weight))
