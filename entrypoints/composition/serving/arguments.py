"""Common arguments of `rollgrad serve agent` and `rollgrad chat`: a model, its tools, and its sampling."""

from collections.abc import Mapping
from pathlib import Path

from attrs import define

from rollgrad.adapters.engines.vllm.arguments import LORA, OWN, argument_problems
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import RESULT_CHARACTERS
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.settings import FREE

VLLM_FLAGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"),
    *("num_engines", "cluster_address", "vllm_extra"),
)
"""Flags that mean something to vLLM alone."""
NO_ADAPTER = "name a model with its adapters merged (`rollgrad merge-lora`) as --model"
SET_HERE: Mapping[str, str] = {
    **OWN,
    "model": "set --model",
    "dtype": "set --dtype",
    "max_num_seqs": "set --max_batch_size",
    **{
        name: f"set --{name}"
        for name in ("max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization")
    },
    "data_parallel_size": "set --num_engines",
    "weight_transfer_config": "newer checkpoints reach vLLM in a way of rollgrad's",
    "enable_sleep_mode": "an engine that serves never sleeps",
    **dict.fromkeys(("generation_config", "override_generation_config"), "set --temperature, --top_p and --top_k"),
    **{name: NO_ADAPTER for name, instead in OWN.items() if instead == LORA},
}
"""Engine arguments of vLLM that are set here, and what to do instead."""
DEFAULT_TEMPERATURE = 0.7
"""Default temperature of chats: livelier than greedy, steadier than the 1 of training."""


@define(kw_only=True)
class AssistantArguments:
    """A model with the tools that it had in training."""

    model: str = ""
    """Directory or hub name of the model; required."""
    tools: str | None = None
    """Tools that the model may call, like --agent.tools in training: python, think, final, files of functions
    (tools.py), MCP servers (mcp:COMMAND or mcp:URL)."""
    python_isolation: PythonIsolation = PythonIsolation.NAMESPACES
    """Isolation of the python tool's code: namespaces, or none, with which the code can do everything that you can."""
    max_result_chars: int = RESULT_CHARACTERS
    """Characters of a tool's result that the model is shown, like --agent.max_result_chars in training."""
    system_prompt: str | None = None
    """System message of conversations that have none."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables for the chat template, like --data.chat_template_kwargs in training: enable_thinking false."""
    temperature: float = DEFAULT_TEMPERATURE
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 is the full distribution."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    max_new_tokens: int = 512
    """Sampled tokens per reply."""
    max_turns: int = 8
    """Replies for one answer, those that call tools included."""
    seed: int | None = None
    """Seeds sampling; default: each answer has a seed of its own."""
    dtype: DType = DType.AUTO
    """Format of the weights; auto is bfloat16 where the hardware multiplies it natively."""

    engine: Engine = Engine.EMBEDDED
    """Engine that samples: embedded (in this process), vllm (in processes of its own), or server (--server_url)."""
    server_url: str | None = None
    """Address of a server that samples in token ids (vLLM's, another rollgrad's); --model then names its tokenizer."""
    tensor_parallel_size: int | None = None
    """GPUs that share each layer in vLLM; default 1."""
    pipeline_parallel_size: int | None = None
    """Stages that vLLM divides the layers into; default 1."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM takes; default 0.9."""
    max_model_len: int | None = None
    """Tokens of a conversation at most in vLLM; default: the model's positions."""
    num_engines: int | None = None
    """Engines of vLLM in a Ray cluster, each with the whole model; default: one in processes of this one's."""
    max_batch_size: int | None = None
    """Replies sampled together at most by an engine; default: 128 by the embedded one, 256 by vLLM."""
    vllm_extra: FREE = None
    """Further engine arguments of vLLM, by vLLM's names: --vllm_extra.kv_cache_dtype fp8. Values are YAML."""
    cluster_address: str | None = None
    """Running Ray cluster of the engines, auto or HOST:PORT; default: one is started here."""

    def params(self) -> SamplingParams:
        """Returns the sampling settings, of which `seed` means nothing if none is set.

        Raises:
            ConfigurationError: one of them is out of range.
        """
        try:
            return SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_new_tokens=self.max_new_tokens,
                seed=(self.seed or 0) % 2**63,
            )
        except ValueError as error:
            raise ConfigurationError(f"A sampling setting is out of range: {error.args[0]}.") from error

    def check(self) -> None:
        """Refuses wrong settings, before anything is loaded.

        Raises:
            ConfigurationError: no model is named, or a setting is out of range.
            CheckpointError: there is no such model.
        """
        if not self.model:
            raise ConfigurationError("--model is not set: name the directory or hub name of a model.")
        if self.max_turns < 1:
            raise ConfigurationError(f"--max_turns is {self.max_turns}, but an answer takes at least one reply.")
        if self.max_result_chars < 100:
            raise ConfigurationError(f"--max_result_chars is {self.max_result_chars}, but it must be at least 100.")
        self._check_engine()
        if self.chat_template_kwargs:
            self._check_template(self.chat_template_kwargs)
        self.params()
        # Of a server's model the tokenizer's files are enough.
        if self.engine is not Engine.SERVER or not Path(self.model).expanduser().is_dir():
            from rollgrad.entrypoints.named_paths import check_model

            check_model("model", self.model)

    @staticmethod
    def _check_template(given: Mapping[str, object]) -> None:
        from rollgrad.application.settings.rules.inputs import RENDERING

        if taken := RENDERING.intersection(given):
            raise ConfigurationError(
                f"--chat_template_kwargs sets {', '.join(sorted(taken))}, which rollgrad itself tells the template: "
                "leave it out."
            )

    def _check_engine(self) -> None:
        if self.engine is Engine.SERVER and self.server_url is None:
            raise ConfigurationError("--engine is server, but --server_url is not set: give the server's address.")
        if self.engine is not Engine.SERVER and self.server_url is not None:
            raise ConfigurationError(f"--server_url is set, but --engine is {self.engine}: set --engine server.")
        if self.server_url is not None and not self.server_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"--server_url is {self.server_url!r}, but it must begin with http:// or https://."
            )
        for name in VLLM_FLAGS:
            value = getattr(self, name)
            if value is not None and self.engine is not Engine.VLLM:
                raise ConfigurationError(f"--{name} is set, but --engine is {self.engine}: set --engine vllm.")
            if isinstance(value, int | float) and value <= 0:
                raise ConfigurationError(f"--{name} is {value}, but it must be above 0.")
        if self.cluster_address is not None and self.num_engines is None:
            raise ConfigurationError("--cluster_address is set, but --num_engines is not: say how many engines to use.")
        if self.max_batch_size is not None and self.engine is Engine.SERVER:
            raise ConfigurationError(
                "--max_batch_size is set, but --engine is server, which has a limit of its own: leave it out."
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigurationError(f"--max_batch_size is {self.max_batch_size}, but it must be 1 or more.")
        problems = argument_problems(self.vllm_extra or {}, "vllm_extra", SET_HERE)
        raise_together([ConfigurationError(problem) for problem in problems])
        if self.gpu_memory_utilization is not None and self.gpu_memory_utilization > 1:
            raise ConfigurationError(
                f"--gpu_memory_utilization is {self.gpu_memory_utilization}, but it is a share, 1 at most."
            )
