"""SkyRL-Gym environments: `init(messages) -> (messages, info)`, `step(text) -> {observations, reward, done, metadata}`.

Works by duck typing: `make` imports SkyRL-Gym, this module does not. A step's `postprocessed_action` is ignored: it
would rewrite sampled text, and only sampled tokens are trained.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.environments.opening import conversation
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, StepResult


class SkyRLEnvironment(Environment):
    """Plays one episode of what `make(prompt)` returns.

    Args:
        make: makes a fresh environment for a prompt, with whose label and metadata it may fill `extras`.
        timeout: seconds for one call of the environment.

    Metrics: the numbers in the environment's `get_metrics()`, on the last turn.
    """

    def __init__(self, make: Callable[[Prompt], Any], *, timeout: float = 60.0) -> None:
        self._make = make
        self._thread = EpisodeThread("The SkyRL-Gym environment", timeout=timeout)
        self._world: Any = None

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the conversation that the environment makes of the prompt's.

        Raises:
            TimeoutError: the environment did not start in time.
        """

        def start() -> list[Message]:
            self._world = self._make(prompt)
            messages, _ = self._world.init(conversation(prompt))
            return list(messages)

        return await self._thread.call("init", start)

    async def step(self, action: Action) -> StepResult:
        """Passes the reply's text to the environment.

        Raises:
            TimeoutError: the environment did not answer in time.
        """

        def answer() -> StepResult:
            output = self._world.step(action.text)
            done = bool(output["done"])
            return StepResult(
                observation=list(output["observations"]),
                reward=float(output["reward"]),
                terminated=done,
                info=output.get("metadata") or {},
                metrics=_numbers(self._world.get_metrics()) if done else {},
            )

        return await self._thread.call("a step", answer)

    async def close(self) -> None:
        """Closes the environment and its thread."""
        await self._thread.close(lambda: self._world)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
