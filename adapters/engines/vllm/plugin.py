"""The plugin that vLLM loads in each of its processes: the entry point `rollgrad` of `vllm.general_plugins`."""

from rollgrad.application.settings.sections.vllm import SyncBackend

BACKEND = "rollgrad"
"""Name of our own weight transfer backend in vLLM: of shared memory, and of files."""

VLLM_BACKENDS = {
    SyncBackend.SHARED_MEMORY: BACKEND,
    SyncBackend.DISK: BACKEND,
    SyncBackend.NCCL: "nccl",
    SyncBackend.CUDA_IPC: "ipc",
}
"""vLLM's names of the backends."""

_registered = False


def register() -> None:
    """Makes the backend known to this process; may be called again."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollgrad.adapters.engines.vllm.weight_receiver import receiver_class

    WeightTransferEngineFactory.register_engine(BACKEND, receiver_class())
    _registered = True
