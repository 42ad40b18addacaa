"""The section `vllm`: the engines of rollout.engine vllm."""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.sections.cluster import IN_CLUSTER
from rollgrad.domain.settings import COUNT, FREE, SOME_SHARE, setting


class SyncBackend(StrEnum):
    """Way of weights from the trainer to vLLM's engines."""

    AUTO = "auto"
    """cuda_ipc where engines share all their GPUs with the trainer, nccl where they share none, else shared_memory."""
    SHARED_MEMORY = "shared_memory"
    """Through the CPU's memory; over the network to engines on other machines."""
    NCCL = "nccl"
    """Broadcast from GPU to GPU."""
    CUDA_IPC = "cuda_ipc"
    """Within the GPU that trainer and engine share."""
    DISK = "disk"
    """Through files below ckpt.output_dir, on a file system that all machines share."""


CPU_CACHE_BYTES = 2 * 2**30
"""vLLM's keys and values on a CPU, where it would otherwise take most of the memory."""


@define(kw_only=True)
class VLLMConfig:
    """vLLM engines; one that dies is replaced, and its replies are sampled again."""

    num_engines: int = setting(
        1, "Engines that share the prompts; more than one needs cluster.enable.", COUNT, only_if=IN_CLUSTER
    )
    tensor_parallel_size: int = setting(1, "GPUs that share each layer of an engine's model.", COUNT)
    pipeline_parallel_size: int = setting(
        1,
        "Stages that an engine's layers are divided into, each on vllm.tensor_parallel_size GPUs of its own: for "
        "models that these GPUs do not hold, or that do not divide by more.",
        COUNT,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of a GPU's memory that an engine takes; default: 0.9, and 0.5 where a model that trains is on the same "
        "GPU (in a run of one process, and with train.colocate_all).",
        SOME_SHARE,
    )
    max_model_len: int | None = setting(
        None,
        "Tokens of a prompt and its reply at most, by which vLLM lays out its memory; default: as many as the run "
        "can ask for (data.max_prompt_tokens and the longest reply, or rollout.max_episode_tokens). Never more than "
        "the model has positions.",
        COUNT,
    )
    sync_backend: SyncBackend = setting(
        SyncBackend.AUTO,
        "How weights reach the engines: auto is cuda_ipc where engines share their GPUs with the actor, nccl where "
        "none does, else shared_memory; disk goes through files below ckpt.output_dir, which all machines then "
        "share.",
    )
    sync_delta: bool = setting(
        False,
        "Send the engines what changed in the weights since the last transfer, with sync_backend shared_memory or "
        "disk: a small part in bfloat16. The actor's first process keeps a copy of all weights to compare with.",
    )

    extra: FREE = setting(
        None,
        "Further engine arguments of vLLM, by vLLM's names: --vllm.extra.kv_cache_dtype fp8. Values are YAML. Those "
        "that other settings set are refused, as are names that vLLM does not have.",
    )

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that share one engine's model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
