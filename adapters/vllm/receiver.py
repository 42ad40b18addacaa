"""The end of the weight channel that lives in vLLM's workers: takes tensors out of shared memory, loads them.

vLLM keeps the tensors of a fused layer until all its parts are there, so a tensor never stays in a bucket: the next one
would overwrite it.
"""

from typing import Any

from attrs import define

from rollgrad.adapters.vllm.buckets import Assembler, Piece, SharedMemory


@define
class ReceiverSettings:
    """What the trainer says once: where the shared memory is, and the bytes of a bucket."""

    path: str
    bucket_bytes: int


@define
class FullBucket:
    """What the trainer says for each bucket: which one, and what lies in it; and, with no pieces, that it was the
    last."""

    bucket: int
    pieces: list[Piece]
    last: bool = False


def receiver_class() -> type:
    """The class that vLLM's factory makes one of in each worker; a function, for the base class takes vLLM's import."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class SharedMemoryReceiver(WeightTransferEngine):  # type: ignore[misc]
        """See the module."""

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
            bucket = self._memory.bucket(update_info.bucket)
            loaded = self.model.load_weights(self._assembler.take(bucket, update_info.pieces))
            self._lacking -= self._lacking if loaded is None else loaded  # a model that names nothing checks for itself
            quantized = self.model_config.quantization is not None  # its scales are made here, not sent
            if update_info.last and ((self._lacking and not quantized) or not self._assembler.whole()):
                raise ValueError(f"these parameters did not come from the trainer: {sorted(self._lacking)[:8]}")

        def finish_weight_update(self) -> None:
            """Repacks what waited."""
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied(self.model)
            self._begun = False

        def shutdown(self) -> None:
            """Nothing to do: the memory goes with the process."""

    return SharedMemoryReceiver


def _repack_tied(model: Any) -> None:
    """A layer whose weight is another's loads none, so vLLM does not repack it: on a CPU its product would go on with
    the packed copy of the old weights."""
    seen: set[int] = set()
    for layer in model.modules():
        weight, method = layer._parameters.get("weight"), getattr(layer, "quant_method", None)
        if weight is not None and method is not None:
            if id(weight) in seen:
                method.process_weights_after_loading(layer)
            seen.add(id(weight))
