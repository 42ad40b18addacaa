"""`AgentSession`: the conversation of one episode between an agent and its environment.

It has messages, tools and rewards. Does not own: tokens (`TokenLedger`), and sampling.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.application.episodes.numbers import returned_number, returned_numbers
from rollgrad.application.foreign import shown
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import DataError, ForeignError
from rollgrad.domain.ports.agent_program import ROLE
from rollgrad.domain.ports.chat_codec import ToolSchema
from rollgrad.domain.ports.environment import (
    Environment,
    Observation,
    StepResult,
    Tool,
    offered,
    tool_schema,
)


class AgentSession:
    """One episode in `environment`.

    `messages` is the conversation so far, None while the episode is plain text (the environment has returned no
    messages, and has no tools and no roles). `opening` is the environment's text after the prompt. `role` is who acts
    next, whose conversation it is; each role has one of its own.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.tools: tuple[ToolSchema, ...] = ()
        self.messages: list[Message] | None = None
        self.opening = ""
        self.role = ""
        self._conversations: dict[str, list[Message]] = {}
        self._begun: dict[str, int] = {}
        self.prompt: Prompt | None = None
        self.results: list[StepResult] = []

    @property
    def last(self) -> StepResult:
        """The environment's latest answer."""
        return self.results[-1] if self.results else StepResult()

    async def start(self, prompt: Prompt) -> None:
        """Resets the environment.

        Raises:
            DataError: the environment returns messages, or has tools or roles, but the prompt is plain text.
            ForeignError: it returns something else, has other tools than `Tool`, or a role that is no word.
        """
        self.prompt = prompt
        opening = await self._environment.reset(prompt)
        _check_observation("reset() returned", opening)
        self.tools = _schemas(offered(self._environment, "tools", ()))  # only now: they may depend on the prompt
        self.role = _checked_role(self._environment)
        if isinstance(opening, str):
            self.opening = opening
        if self.tools or self.role or not isinstance(opening, str):
            self.messages = self._opened(opening)
        self._begun[self.role] = len(self.messages or ())

    @property
    def spoken(self) -> Sequence[Message]:
        """Messages since the opening: replies and the environment's answers; none if the episode is plain text."""
        return (self.messages or [])[self._begun[self.role] :]

    async def advance(self, action: Action) -> StepResult:
        """Passes an action to the environment; the answer is added to the conversation.

        Raises:
            ForeignError: it is no `StepResult`, or has an observation, a reward, a score or a metric that cannot be
                shown, trained on or logged.
            DataError: it is in messages, but the episode is plain text.
        """
        result = await self._environment.step(action)
        check_result("step()", result)
        _check_observation("step() returned the observation", result.observation)
        _check_numbers(result)
        self.results.append(result)
        if self.messages is None and not isinstance(result.observation, str):
            raise DataError(
                "The environment answered in messages, but it opened the episode with text: let reset() return "
                "messages too (the whole opening conversation)."
            )
        if self.messages is not None:
            self.messages.append(action.message)
            ended = result.terminated or result.truncated
            role = self.role if ended else _checked_role(self._environment)
            self._conversations[self.role], self.role = self.messages, role
            if role in self._conversations:
                self.messages = self._conversations[role]
                self.messages.extend(_in_messages(result.observation))
            else:
                self.messages = self._opened(result.observation)
                self._begun[role] = len(self.messages)
        return result

    def _opened(self, observation: Observation) -> list[Message]:
        """Returns a conversation that begins with an observation, or with the prompt if that is a text or empty."""
        assert self.prompt is not None
        begins = not isinstance(observation, str) and len(observation) > 0
        return [*([] if begins else self._conversation(self.prompt)), *_in_messages(observation)]

    @staticmethod
    def _conversation(prompt: Prompt) -> list[Message]:
        if not prompt.messages:
            raise DataError(
                "The episode has tools or roles or speaks in messages, but its prompt is a plain text: use "
                "--data.apply_chat_template True, or let reset() return the opening conversation."
            )
        return list(prompt.messages)


def check_result(method: str, result: Any) -> None:
    """Refuses what a method of an environment returned, if it is no `StepResult`.

    Raises:
        ForeignError: it is not.
    """
    if not isinstance(result, StepResult):
        raise ForeignError(
            f"The environment's {method} returned {shown(result)}, but it returns a StepResult: "
            "StepResult(observation=..., reward=..., terminated=...)."
        )


def _check_observation(what: str, value: Any) -> None:
    """Refuses what is neither a text nor a list of messages."""
    messages = isinstance(value, Sequence) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value
    )
    if not (isinstance(value, str) or messages):
        raise ForeignError(
            f"The environment's {what} {shown(value)}, but that is a text, or a list of messages, each with its role."
        )


def _in_messages(observation: Observation) -> list[Message]:
    if not isinstance(observation, str):
        return list(observation)
    return [{"role": "user", "content": observation}] if observation else []


def _checked_role(environment: Environment) -> str:
    """Returns the role that acts next; empty without roles.

    Raises:
        ForeignError: it is no word.
    """
    role = offered(environment, "acting_role", "")
    if role and not (isinstance(role, str) and ROLE.fullmatch(role)):
        raise ForeignError(
            f"The environment's acting_role is {shown(role)}: it must be a word of at most 64 letters, digits, '-', "
            "'_' and '.'."
        )
    return role


def _schemas(tools: Sequence[Any]) -> tuple[ToolSchema, ...]:
    for tool in tools:
        if not isinstance(tool, Tool):
            raise ForeignError(
                f"The environment has the tool {shown(tool)}, which is none: make a function one with "
                "rollgrad.adapters.tools.function.FunctionTool."
            )
    names = [tool.name for tool in tools]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ForeignError(f"The environment has two tools called {', '.join(twice)}: rename one of them.")
    return tuple(map(tool_schema, tools))


def _check_numbers(result: StepResult) -> None:
    """Refuses what would end the whole run where it is learned from."""
    who = "The environment"
    for what, value in (("reward", result.reward), ("score", result.score)):
        if value is not None:
            returned_number(who, what, value)
    returned_numbers(who, "rewards", "reward of the role", result.rewards)
    returned_numbers(who, "reward_parts", "reward part", result.reward_parts)
    returned_numbers(who, "metrics", "metric", result.metrics)
