"""Environments: tools, the rules of a step, and rewards."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import structlog

from rollgrad.adapters.openrlhf.agent_library.tools import FinalTool, ThinkTool, ToolRegistry, call_tool, schema
from rollgrad.adapters.openrlhf.agent_library.types import Hint, ToolCall, ToolResult
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.domain.errors import ConfigurationError, ForeignError, RollgradError

MAX_STEPS = 66
"""Turns of an episode unless told otherwise."""
FINAL = "final"
"""The tool whose answer ends an episode."""
SYSTEM_PROMPT = (
    "You solve tasks step by step with the help of tools. Every reply calls at least one of them. When you know the "
    "answer, give it with the tool `final`, which ends the task."
)

log = structlog.get_logger(__name__)


class Environment(ABC):
    """The world of one episode: the model's actions, and their rewards."""

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Turns of an episode."""

    @property
    @abstractmethod
    def system_prompt(self) -> str:
        """System prompt of the model."""

    @abstractmethod
    def tools_manifest(self) -> list[dict[str, Any]]:
        """Returns the tools in the OpenAI shape."""

    @abstractmethod
    def execute_tool(self, name: str, args: dict[str, Any], context: dict[str, Any]) -> ToolResult:
        """Runs one tool."""

    def reward_hook(self, tool_name: str, tool_args: dict[str, Any], label: Any) -> float:
        """Returns the reward of a call that was carried out; it is not called when the episode serves a user."""
        return 0.0

    @abstractmethod
    def reset(self, observation: str | None = None) -> None:
        """Starts an episode; `observation` is its task."""

    @abstractmethod
    def step(
        self, actions: Sequence[ToolCall | None] | None, label: Any = None, runtime: bool = False
    ) -> tuple[list[str], float, bool]:
        """Returns one observation for each call, the turn's reward, and whether the episode is over. `actions` is None
        without any call, and has None for a call that could not be read. With `runtime` nothing is rewarded."""

    def _internal_obs(
        self, code: str, message: str, *, hint: str | None = None, tool: str | None = None, extras: Any = None
    ) -> str:
        """Returns an observation that the model sees and no user does."""
        content: dict[str, Any] = {"ok": False, "error": {"code": code, "message": message}}
        content |= {key: value for key, value in (("hint", hint), ("tool", tool)) if value is not None}
        content["allowed_tools"] = [one["function"]["name"] for one in self.tools_manifest()]
        return Hint(json.dumps(content | dict(extras or {}), ensure_ascii=False))


class ReActEnvironment(Environment):
    """Lets the model call tools until the tool `final` gives the answer.

    `registry` has the tools `think` and `final`; register more before the episode starts. The reward is 1 if the
    answer is the label, and 0.1 if only its last verdict, such as `[[A]]`, is.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._step = 0
        self.registry = ToolRegistry([ThinkTool(), FinalTool()])

    @property
    def max_steps(self) -> int:
        """Turns of an episode."""
        return self._max_steps

    @property
    def system_prompt(self) -> str:
        """System prompt of the model."""
        return SYSTEM_PROMPT

    def tools_manifest(self) -> list[dict[str, Any]]:
        """Returns the tools in the OpenAI shape."""
        return self.registry.list_openai_tools()

    def reset(self, observation: str | None = None) -> None:
        """Starts an episode."""
        self._step = 0

    def reward_hook(self, tool_name: str, tool_args: dict[str, Any], label: Any) -> float:
        """Returns the reward of the answer; override it for another."""
        if tool_name != FINAL or label is None:
            return 0.0
        return compute_reward(str(tool_args.get("answer", "")), str(label))

    def execute_tool(self, name: str, args: dict[str, Any], context: dict[str, Any]) -> ToolResult:
        """Runs one tool. The model is told no details of an exception that the tool raises."""
        call_id = str(context.get("tool_call_id", ""))
        try:
            with foreign_code(ForeignError):
                result = call_tool(self.registry.get(name), args, context)
        except RollgradError as error:
            log.warning("tool_failed", tool=name, error=error_text(error.__cause__ or error))
            return ToolResult(call_id, f"The tool {name!r} failed.", is_error=True)
        return ToolResult(call_id, result.content, is_error=result.is_error)

    def step(
        self, actions: Sequence[ToolCall | None] | None, label: Any = None, runtime: bool = False
    ) -> tuple[list[str], float, bool]:
        """Implements `Environment.step`: calls are carried out in order, none after `final`."""
        self._step += 1
        over = self._step >= self.max_steps
        if actions is None:
            message = "The reply calls no tool; every reply must call one."
            return [self._internal_obs("no_tool_call", message, hint="Answer with the tool `final`.")], 0.0, over
        observations, reward, final = [], 0.0, False
        for call in actions:
            if final:
                message = "The answer was given before: this call was not carried out."
                observations.append(self._internal_obs("ignored_after_final", message))
                continue
            problem = self._problem(call)
            if problem is not None or call is None:
                observations.append(problem or "")
                continue
            result = self.execute_tool(call.name, call.arguments, {"step": self._step, "tool_call_id": call.id})
            if result.is_error:
                observations.append(self._internal_obs("tool_runtime_error", result.content, tool=call.name))
                continue
            observations.append(result.content)
            reward += 0.0 if runtime else float(self.reward_hook(call.name, call.arguments, label))
            final = call.name == FINAL
        return observations, reward, over or final

    def _problem(self, call: ToolCall | None) -> str | None:
        """Returns what is wrong with a call, None if nothing is."""
        if call is None:
            message = "The tool call is not one JSON object with a name and arguments."
            return self._internal_obs("invalid_action_format", message)
        if call.name not in self.registry.names():
            return self._internal_obs("invalid_action", f"There is no tool {call.name!r}.", tool=call.name)
        wanted = schema(self.registry.get(call.name)).get("required", ())
        missing = [name for name in wanted if call.arguments.get(name) is None or not str(call.arguments[name]).strip()]
        if missing:
            message = f"The call lacks {', '.join(missing)}."
            return self._internal_obs("invalid_arguments", message, tool=call.name)
        return None


DefaultEnvironment = ReActEnvironment
"""Class of the environment that `make_environment()` makes."""


def compute_reward(response: str, target: str) -> float:
    """Returns 1 for the target itself, 0.1 if the last `[[X]]` of the response is the target, else 0.

    >>> compute_reward(" 42 ", "42"), compute_reward("The better one is [[A]]", "A"), compute_reward("41", "42")
    (1.0, 0.1, 0.0)
    """
    if response.strip() == target.strip():
        return 1.0
    last = response.rpartition("[[")[2].partition("]]")
    said = last[0].strip() if last[1] and "[[" in response else None
    return 0.1 if said is not None and said == target.strip().removeprefix("[[").removesuffix("]]") else 0.0


def make_environment(name: str | None = None, **kwargs: Any) -> Environment:
    """Returns the environment called `name`: `default`, whose arguments are those of `ReActEnvironment`.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in (None, "", "default"):
        raise ConfigurationError(
            f"There is no environment {name!r}: the only one is 'default', or make your own class."
        )
    return ReActEnvironment(**kwargs)
