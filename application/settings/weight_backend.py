"""Decides the way of weights from the trainer to vLLM's engines, by which of them share GPUs."""

from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.errors import ConfigurationError

NEED_GPUS = (SyncBackend.NCCL, SyncBackend.CUDA_IPC)

BUCKET_BYTES = 256 * 2**20
"""Bytes of a bucket in GPU memory, at each end of a transfer; a matrix that is larger gets one of its own size."""

RECEIVED_BUCKETS = 2
"""Number of buckets into which engines receive by NCCL."""


def shares_gpus(config: RLConfig) -> bool:
    """Whether engines are on the actor's GPUs: where one process trains and samples, or all roles share."""
    return not config.cluster.enable or config.train.colocate_all


def engines_without_actor(config: RLConfig) -> int:
    """Returns the number of shared GPUs with an engine but without a process of the actor."""
    processes = ranks(config, "actor") if config.cluster.enable else 1
    return max(0, config.vllm.num_engines * config.vllm.gpus_per_engine - processes)


def sync_backend(config: RLConfig, *, gpus: bool, without: str = "") -> SyncBackend:
    """The backend of a run where there are GPUs, or none, or where torch or vLLM computes on none, as the clause
    `without` says; never auto.

    Raises:
        ConfigurationError: the one that was asked for needs GPUs.
    """
    asked, gpus = config.vllm.sync_backend, gpus and not without
    if asked in NEED_GPUS and not gpus:
        raise ConfigurationError(
            f"vllm.sync_backend is {asked}, which needs GPUs, but {without or 'there is none here'}: set "
            "--vllm.sync_backend auto or shared_memory."
        )
    if asked is not SyncBackend.AUTO:
        return asked
    adapter = config.actor.lora.sync is LoraSync.ADAPTER
    if adapter or not gpus or (shares_gpus(config) and engines_without_actor(config)):
        return SyncBackend.SHARED_MEMORY
    return SyncBackend.CUDA_IPC if shares_gpus(config) else SyncBackend.NCCL
