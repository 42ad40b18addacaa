"""Gymnasium environments whose observations and actions can be expressed as text.

Invariant: no reply of the model breaks an episode. A reply that cannot be read, or is not an action of the environment,
is answered by a message to the model and counted, and the environment is not stepped. Works by duck typing: `make`
imports Gymnasium, this module does not.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.environments.opening import opening, prompt_seed, user_message
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import Environment, StepResult

_INTEGER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")


class GymnasiumEnvironment(Environment):
    """Plays one episode of what `make()` returns, seeded by the prompt (`prompt_seed`).

    Args:
        make: makes a fresh Gymnasium environment, in the thread in which all its calls run.
        render: turns an observation into text.
        parse: turns a reply into an action; it raises ValueError or returns None if the reply has none. By default the
            last whole number of the reply for Discrete spaces, the stripped reply for Text spaces.
        invalid_reward: reward of a turn without a valid action. It should be below the cost of a step; else saying
            nothing pays.
        max_invalid_actions: truncates the episode at that many turns without a valid action; None for no limit.
        timeout: seconds for one call of the environment.

    Metrics: `invalid_actions`, the number so far.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        render: Callable[[Any], str] = str,
        parse: Callable[[str], Any] | None = None,
        invalid_reward: float = 0.0,
        max_invalid_actions: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._make = make
        self._render = render
        self._parse = parse
        self._invalid_reward = invalid_reward
        self._max_invalid_actions = max_invalid_actions
        self._thread = EpisodeThread("The Gymnasium environment", timeout=timeout)
        self._world: Any = None
        self._invalid = 0

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's conversation with the first observation.

        Raises:
            ConfigurationError: the environment's actions need a `parse`, and there is none.
            TimeoutError: the environment did not start in time.
        """

        def start() -> str:
            self._world = self._make()
            if self._parse is None:
                self._parse = _default_parse(self._world.action_space)
            observation, _ = self._world.reset(seed=prompt_seed(prompt))
            return self._render(observation)

        self._invalid = 0
        return opening(prompt, await self._thread.call("reset", start))

    async def step(self, action: Action) -> StepResult:
        """Takes the action in the reply, or returns a message that says which actions are allowed.

        Raises:
            TimeoutError: the environment did not answer in time.
        """
        return await self._thread.call("a step", lambda: self._answer(action.text))

    async def close(self) -> None:
        """Closes the environment and its thread."""
        await self._thread.close(lambda: self._world)

    def _answer(self, reply: str) -> StepResult:
        assert self._parse is not None
        space = self._world.action_space
        try:
            action = self._parse(reply)
        except ValueError:
            action = None
        if action is None or not space.contains(action):
            return self._invalid_action(space)
        observation, reward, terminated, truncated, info = self._world.step(action)
        return StepResult(
            observation=user_message(self._render(observation)),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
            metrics={"invalid_actions": float(self._invalid)},
        )

    def _invalid_action(self, space: Any) -> StepResult:
        self._invalid += 1
        return StepResult(
            observation=user_message(f"That is no valid action. {_allowed(space)}"),
            reward=self._invalid_reward,
            truncated=self._max_invalid_actions is not None and self._invalid >= self._max_invalid_actions,
            metrics={"invalid_actions": float(self._invalid)},
        )


def _default_parse(space: Any) -> Callable[[str], Any]:
    match type(space).__name__:
        case "Discrete":
            return _last_integer
        case "Text":
            return str.strip
    raise ConfigurationError(
        f"The environment's actions are {space}, but replies are read by themselves only as actions of Discrete and "
        "Text spaces: give GymnasiumEnvironment a parse function that turns a reply into an action."
    )


def _last_integer(reply: str) -> int:
    numbers: list[str] = _INTEGER.findall(reply)
    if not numbers:
        raise ValueError("no number")
    return int(numbers[-1])


def _allowed(space: Any) -> str:
    match type(space).__name__:
        case "Discrete":
            return f"Answer with a whole number from {space.start} to {space.start + space.n - 1}."
        case "Text":
            length = f"{space.min_length} to {space.max_length} characters"
            return f"Answer with {length}, each one of {''.join(sorted(space.character_set))}"
    return f"Valid actions are those of {space}."
