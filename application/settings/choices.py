"""The values that settings choose from."""

from enum import StrEnum


class KLEstimator(StrEnum):
    """Schulman's approximations of the KL divergence, and k3 weighed by the importance ratio."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"


class KLAgainst(StrEnum):
    """What the policy is kept near."""

    REFERENCE = "reference"
    ROLLOUT = "rollout"


class Whiten(StrEnum):
    """Over what advantages are centred and scaled."""

    NONE = "none"
    BATCH = "batch"
    GROUP = "group"


class CorrectionLevel(StrEnum):
    """Where the importance ratio of an off-policy correction is taken."""

    AUTO = "auto"
    """token where samples may be stale and nothing else corrects them, else off."""
    OFF = "off"
    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class CorrectionMode(StrEnum):
    """What becomes of a ratio outside the bounds."""

    TRUNCATE = "truncate"
    CLIP = "clip"
    MASK = "mask"


class CorrectionGate(StrEnum):
    """What else leaves a token or a sequence out."""

    RATIO = "ratio"
    BINARY_KL = "binary_kl"
    TV = "tv"
    OPSM = "opsm"


class Normalise(StrEnum):
    """What rewards are centred and scaled by before any baseline."""

    NONE = "none"
    RUNNING = "running"
    DATASET = "dataset"
    MODEL = "model"


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    PROMPT_MEAN = "prompt_mean"
    CONSTANT_LENGTH = "constant_length"


class OldLogprobs(StrEnum):
    """Where the log-probs of the policy before the update come from."""

    RECOMPUTE = "recompute"
    ROLLOUT = "rollout"
    INTERPOLATE = "interpolate"


class Engine(StrEnum):
    """What samples."""

    EMBEDDED = "embedded"
    """In this process, from the trained model itself where nothing samples during an update."""
    VLLM = "vllm"
    """vLLM, in processes of its own: pip install rollgrad[vllm]."""
    SERVER = "server"
    """Servers that are there already (`vllm serve`), by their URLs."""


class SyncBackend(StrEnum):
    """How weights get from the trainer to vLLM's engines."""

    AUTO = "auto"
    """cuda_ipc where each engine shares its GPU with the trainer, nccl where none does, else shared_memory."""
    SHARED_MEMORY = "shared_memory"
    """Through the CPU's memory; over the network to engines on other machines."""
    NCCL = "nccl"
    """From GPU to GPU."""
    CUDA_IPC = "cuda_ipc"
    """Within the GPU that trainer and engine share."""
    DISK = "disk"
    """Through files below ckpt.output_dir, on a file system that all machines share."""


class DType(StrEnum):
    """Number format of forward and backward; master weights and losses stay float32."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Optim(StrEnum):
    """What steps hidden matrices; embeddings, head, norms and biases are AdamW's either way."""

    ADAM = "adam"
    MUON = "muon"


class LoraSync(StrEnum):
    """What of a model with adapters goes to engines."""

    MERGED = "merged"
    ADAPTER = "adapter"


class LRScheduler(StrEnum):
    """Learning rate over the run, after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"


class Overlong(StrEnum):
    """What becomes of prompts that are longer than allowed."""

    DROP = "drop"
    ERROR = "error"


class Verifier(StrEnum):
    """Built-in verifiable rewards."""

    LAST_NUMBER = "last_number"
    EXACT_MATCH = "exact_match"
    MATH = "math"
    FORMAT = "format"


class Resume(StrEnum):
    """Whether a run continues from the training state in its directory."""

    NEVER = "never"
    """It starts anew."""
    ALWAYS = "always"
    """It continues; without a training state it is refused."""
    AUTO = "auto"
    """It continues if there is a training state, else it starts anew: for jobs that are started again and again."""

    @classmethod
    def _missing_(cls, value: object) -> "Resume | None":
        """True and False, as the setting was before it knew auto."""
        return {True: cls.ALWAYS, False: cls.NEVER}.get(value) if isinstance(value, bool) else None


class PythonIsolation(StrEnum):
    """What the python tool's code is shut in with."""

    NAMESPACES = "namespaces"
    """Linux namespaces, besides limits: no network, no other processes, no files of yours."""
    NONE = "none"
    """Limits alone: the code may do what you may do."""


class JudgeIsolation(StrEnum):
    """What judges of replies are shut in with, where parsing a reply could run it."""

    SANDBOX = "sandbox"
    """No network, no file but installed packages, no environment; Linux namespaces, or else Landlock."""
    NONE = "none"
    """Limits on memory and time alone: a reply that runs as code may do what you may do."""
