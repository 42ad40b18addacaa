"""Ports: the environment that an agent acts in, and the tools that it may call."""

from collections.abc import Mapping, Sequence
from inspect import getattr_static
from typing import Any, Protocol, TypeVar, runtime_checkable

from attrs import field, frozen

from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import Action, Message, ToolResult
from rollgrad.domain.episodes.prompts import Prompt

Observation = str | Sequence[Message]
"""Text, which is appended to the model's tokens unchanged (special tokens in it are real: the environment writes the
template), or chat messages, which the model's chat template renders (special tokens in them are plain text)."""

Offer = TypeVar("Offer")


class WholePrompt(str):
    """Text from `reset` that replaces the prompt instead of following it; special tokens in it are real."""

    __slots__ = ()


@frozen(kw_only=True)
class StepResult:
    """Answer of the environment to an action, with Gymnasium's names."""

    observation: Observation = ""
    images: Sequence[Any] = ()
    """Images of an observation that is a text, whose places are the model's own marks in it. Messages have theirs as
    parts `{"type": "image", "image": ...}`."""
    reward: float | None = 0.0
    """None asks the run's reward (`config.reward`) for it in the last step, and counts as 0 in an earlier one."""
    terminated: bool = False
    truncated: bool = False
    score: float | None = None
    """None is the sum of the rewards so far."""
    info: Mapping[str, Any] = field(factory=dict)
    sampling: SamplingParams | None = None
    """Replaces the sampling settings of later turns, except their seed."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Those of the last step are logged."""
    rewards: Mapping[str, float] = field(factory=dict)
    """Reward of the latest action of each role, from an environment that `PlaysRoles`. For the role that has just acted
    it is added to `reward`."""
    reward_parts: Mapping[str, float] = field(factory=dict)
    """In the last step: named rewards whose weighted sum is the episode's reward."""
    answer: str | None = None
    """In the last step: what the episode answered, as in a `Reward`."""
    feedback: str | None = None
    """In the last step: what there is to say of it, as in a `Reward`."""
    state: str | None = None
    """Name of the state in which the next action is chosen, for estimators that compare actions of a group in equal
    states. With None the observation before the action names it."""


@runtime_checkable
class Environment(Protocol):
    """The world of one episode; each episode has its own instance. Promises: `close` may be called at any time and more
    than once.

    An environment with tools also `OffersTools`: the prompt then tells the model of them. Without tools the
    model is told nothing.
    """

    async def reset(self, prompt: Prompt) -> Observation:
        """Starts the episode. A text is returned that follows the prompt (often an empty one), or messages or a
        `WholePrompt` that replace it."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Answers an action."""
        ...

    async def close(self) -> None:
        """Releases the resources of the episode."""
        ...


ENVIRONMENT_METHODS = ("reset", "step", "close")
"""Methods of an environment."""


def missing_methods(kind: type[Any]) -> list[str]:
    """Returns the methods of an environment that a class lacks."""
    return [name for name in ENVIRONMENT_METHODS if not callable(getattr(kind, name, None))]


@runtime_checkable
class Tool(Protocol):
    """A function that the model may call. Promises: `close` may be called at any time and more than once."""

    @property
    def name(self) -> str:
        """Name, unique within an environment."""
        ...

    @property
    def description(self) -> str:
        """Description for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs the tool. A mistake of the model is returned as a result with `is_error`; an exception is a defect of
        the tool."""
        ...

    async def close(self) -> None:
        """Releases the resources of the tool."""
        ...


@runtime_checkable
class KeepsEpisodes(Protocol):
    """A tool that keeps something from one call to the next, which episodes must not share."""

    def for_episode(self) -> Tool:
        """Returns the tool of one episode, whose owner closes it."""
        ...


def tool_for_episode(tool: Tool) -> Tool:
    """Returns another tool for an episode alone, if the tool keeps something, or else the tool itself."""
    return tool.for_episode() if isinstance(tool, KeepsEpisodes) else tool


@runtime_checkable
class OffersTools(Protocol):
    """An environment whose model may call tools."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of the episode, from the end of `reset` on; none is as good as no tools."""
        ...


@runtime_checkable
class PlaysRoles(Protocol):
    """An environment in which several roles act, each of which is learned from with a reward of its own.

    Each has a conversation of its own, in messages: an observation is for the role that acts next, whose conversation
    it begins if that has not acted yet (messages replace the prompt then, and a text follows it).
    """

    @property
    def acting_role(self) -> str:
        """The role that acts next, from the end of `reset` on: a word (`ROLE`); empty if there are no roles."""
        ...


def offered(environment: Any, name: str, default: Offer) -> Offer:
    """Returns an attribute that not every environment has (`tools`, `acting_role`), or `default` where it is missing or
    None. A property that raises, be it an AttributeError, is not taken for a missing one."""
    try:
        found: Offer | None = getattr(environment, name)  # also of a wrapper, by its __getattr__
    except AttributeError:
        if getattr_static(environment, name, None) is not None:
            raise
        return default
    return default if found is None else found


def tool_schema(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool, as chat templates and OpenAI clients take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
