"""Processes: the sections `cluster`, `ds` and `vllm`."""

from attrs import define

from rollgrad.application.settings.choices import SyncBackend

GRADIENTS = 2
"""The stage of ZeRO that divides gradients too: in 16 bits the least that DeepSpeed carries out alike."""

PARAMETERS = 3
"""The stage of ZeRO that divides parameters too."""

BUCKET_NUMBERS = 500_000_000
"""Gradients that are sent together, DeepSpeed's default."""

CPU_CACHE_BYTES = 2 * 2**30
"""vLLM's keys and values on a CPU, where it would otherwise take most of the memory."""


@define(kw_only=True)
class ClusterConfig:
    """Ray: models and engines in processes of their own."""

    enable: bool = False
    """Let Ray place actor, critic, reference and vLLM engines in processes of their own, and DeepSpeed train in them
    (pip install rollgrad[ray,deepspeed,vllm]); without it models are trained in this process."""
    address: str | None = None
    """Ray cluster to join: auto, or host:port of its head; none starts one on this machine for as long as the run."""
    timeout: float = 1800.0
    """Seconds that any wait for a training process may take."""


@define(kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO: what is divided over the processes of a model."""

    zero_stage: int = 2
    """0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too; in 16 bits, 0 and 1 are 2."""
    adam_offload: bool = False
    """Keep the optimizer's state in the CPU's memory, and step there."""
    param_offload: bool = False
    """Keep parameters in the CPU's memory; zero_stage 3 only."""
    sequence_parallel_size: int = 1
    """Processes that share each forward and backward pass, dividing its tokens and, in the attention, its heads
    (Ulysses): for sequences that do not fit into one process. Divides the processes of every model; at most its
    key/value heads."""
    tensor_parallel_size: int = 1
    """Processes that share each layer, dividing its weights (AutoTP): for models whose layers do not fit into one
    process, or whose passes are to be faster. Divides the processes of every model; at most its key/value heads."""


@define(kw_only=True)
class VLLMConfig:
    """vLLM engines; one that dies is replaced, and its replies are sampled again."""

    num_engines: int = 1
    """Engines that share the prompts; more than one needs cluster.enable."""
    tensor_parallel_size: int = 1
    """GPUs that share each layer of an engine's model."""
    pipeline_parallel_size: int = 1
    """Stages that an engine's layers are divided into, each on vllm.tensor_parallel_size GPUs of its own: for models
    that these GPUs do not hold, or that do not divide by more."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that an engine may take; lower it where models share the GPU."""
    max_model_len: int | None = None
    """Tokens of a prompt and its reply at most, by which vLLM lays out its memory; default: as many as the run can ask
    for (data.max_prompt_tokens and the longest reply, or rollout.max_episode_tokens). Never more than the model has
    positions."""
    sync_backend: SyncBackend = SyncBackend.AUTO
    """How weights reach the engines: auto is cuda_ipc where each engine shares its GPU with the actor, nccl where none
    does, else shared_memory; disk goes through files below ckpt.output_dir, which all machines then share."""

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that share one engine's model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
