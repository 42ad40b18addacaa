"""GEM environments: Gymnasium's five values, with text for observations and actions.

Works by duck typing: whatever has `reset(seed=...) -> (text, info)` and `step(text) -> (text, reward, terminated,
truncated, info)` will do. GEM draws from the global random generators, so its calls run inside `GlobalRandomness`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.environments.episode_thread import EpisodeThread
from rollgrad.adapters.environments.global_randomness import GlobalRandomness
from rollgrad.adapters.environments.opening import opening, prompt_seed, user_message
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, StepResult


class GemEnvironment(Environment):
    """Plays one episode of what `make()` returns, seeded by the prompt (`prompt_seed`).

    Each observation is a message of its own, between the `prefix` and the `suffix` in the environment's info, if there
    are any. The environment must be without GEM's history wrappers, because the conversation is the history.

    Args:
        make: makes a fresh environment, such as `partial(gem.make, "game:GuessTheNumber-v0")`.
        timeout: seconds for one call of the environment.
    """

    def __init__(self, make: Callable[[], Any], *, timeout: float = 60.0) -> None:
        self._make = make
        self._thread = EpisodeThread("The GEM environment", timeout=timeout)
        self._timeout = timeout
        self._randomness = GlobalRandomness(0)
        self._world: Any = None

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's conversation with the first observation.

        Raises:
            TimeoutError: the environment did not start in time.
        """
        seed = prompt_seed(prompt)
        self._randomness = GlobalRandomness(seed, self._timeout)

        def start() -> str:
            with self._randomness.installed():
                self._world = self._make()
                observation, info = self._world.reset(seed=seed)
            return _as_text(observation, info)

        return opening(prompt, await self._thread.call("reset", start))

    async def step(self, action: Action) -> StepResult:
        """Passes the reply's text to the environment.

        Raises:
            TimeoutError: the environment did not answer in time.
        """

        def answer() -> StepResult:
            with self._randomness.installed():
                observation, reward, terminated, truncated, info = self._world.step(action.text)
            return StepResult(
                observation=user_message(_as_text(observation, info)),
                reward=float(reward),
                terminated=bool(terminated),
                truncated=bool(truncated),
                info=info,
            )

        return await self._thread.call("a step", answer)

    async def close(self) -> None:
        """Closes the environment, if it can be closed, and its thread."""
        await self._thread.close(lambda: self._world)


def _as_text(observation: str, info: Mapping[str, Any]) -> str:
    return "\n".join(part for part in (info.get("prefix"), observation, info.get("suffix")) if part)
