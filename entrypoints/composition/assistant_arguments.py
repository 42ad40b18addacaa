"""Common arguments of `rollgrad serve agent` and `rollgrad chat`: a model, its tools, and its sampling."""

from attrs import define

from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.agent import PythonIsolation
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import ConfigurationError

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
    system_prompt: str | None = None
    """System message of conversations that have none."""
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
    """Seeds sampling; default: another each time."""
    dtype: DType = DType.AUTO
    """Format of the weights; auto is bfloat16 where the hardware multiplies it natively."""

    def params(self) -> SamplingParams:
        """Returns the sampling settings.

        Raises:
            ConfigurationError: one of them is out of range.
        """
        import secrets

        try:
            return SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_new_tokens=self.max_new_tokens,
                seed=secrets.randbits(62) if self.seed is None else self.seed % 2**63,
            )
        except ValueError as error:
            raise ConfigurationError(f"A sampling setting is out of range: {error.args[0]}.") from error

    def check(self) -> None:
        """Refuses wrong settings, before anything is loaded.

        Raises:
            ConfigurationError: no model is named, or a setting is out of range.
        """
        if not self.model:
            raise ConfigurationError("--model is not set: name the directory or hub name of a model.")
        if self.max_turns < 1:
            raise ConfigurationError(f"--max_turns is {self.max_turns}, but an answer takes at least one reply.")
        self.params()
