"""Ports: the world an agent acts in, and the tools it may call."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

from rollgrad.domain.prompts import Prompt
from rollgrad.domain.sampling import Generation, SamplingParams


@frozen(kw_only=True)
class StepResult:
    """What the environment answers (Gymnasium's names). `score` defaults to the sum of rewards so far. `sampling`
    replaces the sampling settings of the turns to come (but for their seed). `metrics` of the last step are logged."""

    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    score: float | None = None
    info: Mapping[str, Any] = field(factory=dict)
    sampling: SamplingParams | None = None
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One instance plays one episode. Promises: `close` may be called at any time and more than once."""

    async def reset(self, prompt: Prompt) -> str:
        """Starts the episode; returns text to append to the prompt (often empty)."""
        ...

    async def step(self, action_text: str, generation: Generation) -> StepResult:
        """Answers an action."""
        ...

    async def close(self) -> None:
        """Releases what the episode holds."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A function the model may call."""

    @property
    def name(self) -> str:
        """Unique within an environment."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Runs the tool; its errors become text for the model."""
        ...
