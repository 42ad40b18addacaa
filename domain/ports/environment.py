"""Ports: the world an agent acts in, and the tools it may call."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import Action, Message, ToolResult
from rollgrad.domain.episodes.prompts import Prompt

Observation = str | Sequence[Message]
"""Text, appended to the model's tokens as it is (special tokens in it are real, the environment writes the template),
or chat messages, which the model's own template renders (special tokens in them are text)."""


class WholePrompt(str):
    """Text that `reset` returns in place of the prompt, rather than after it; special tokens in it are real."""

    __slots__ = ()


@frozen(kw_only=True)
class StepResult:
    """What the environment answers (Gymnasium's names). `reward` None leaves the judgement to the run's reward
    (`config.reward`): of the last step it asks for that reward, of an earlier one it counts as 0. `score` defaults to
    the sum of rewards so far. `sampling` replaces the sampling settings of the turns to come (but for their seed).
    `metrics` of the last step are logged; its `reward_parts` are the named rewards that the episode's reward is the
    weighted sum of, if it is one."""

    observation: Observation = ""
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    score: float | None = None
    info: Mapping[str, Any] = field(factory=dict)
    sampling: SamplingParams | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    reward_parts: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One instance plays one episode. Promises: `close` may be called at any time and more than once.

    An environment with tools also has an attribute `tools`, a sequence of `Tool`: the prompt then tells the model of
    them. Without it the model is told nothing.
    """

    async def reset(self, prompt: Prompt) -> Observation:
        """Starts the episode; returns what follows the prompt (often nothing), or, as messages or as a `WholePrompt`,
        what stands in its place."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Answers an action."""
        ...

    async def close(self) -> None:
        """Releases what the episode holds."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A function the model may call. Promises: `close` may be called at any time and more than once."""

    @property
    def name(self) -> str:
        """Unique within an environment."""
        ...

    @property
    def description(self) -> str:
        """What the model is told of it."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs the tool. What the model did wrong comes back as a result with `is_error`; what it raises is the tool's
        own defect."""
        ...

    async def close(self) -> None:
        """Releases what the tool holds."""
        ...


def tool_schema(tool: Tool) -> Mapping[str, Any]:
    """Returns a tool as chat templates and OpenAI clients are told of it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
