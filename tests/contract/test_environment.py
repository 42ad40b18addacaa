"""Promises of every environment."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from rollgrad.adapters.environments.gem import GemEnvironment
from rollgrad.adapters.environments.gymnasium import GymnasiumEnvironment
from rollgrad.adapters.environments.nemo_gym import NemoGymEnvironment
from rollgrad.adapters.environments.openenv import OpenEnvEnvironment
from rollgrad.adapters.environments.plain_methods import awaitable_environment
from rollgrad.adapters.environments.skyrl import SkyRLEnvironment
from rollgrad.adapters.environments.textarena import TextArenaEnvironment
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Action, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, StepResult, Tool
from rollgrad.testing.environment import FakeEnvironment
from tests.fakes.environment_servers import NEMO_GYM_TOOLS, nemo_gym_app, openenv_app, serve

JUNK = [
    "",
    " ",
    "7" * 50,
    "9" * 4000,
    "-",
    "\x00",
    "½ ² ٣",
    "[",
    '{"message": 3}',
    "😀" * 1000,
    "[1] [2] [3]",
    "<|im_end|>",
]
TURN_LIMIT = 60
Make = Callable[[], Environment]


class GemGame:
    """GEM's shape: any number ends it."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "A number?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "A number!", 0.1, any(letter.isdigit() for letter in action), False, {}


class PlainGame:
    """A user's environment without `async`: any number ends it."""

    def reset(self, prompt: Prompt) -> str:
        return ""

    def step(self, action: Action) -> StepResult:
        return StepResult(observation="A number!", reward=0.1, terminated=any(map(str.isdigit, action.text)))

    def close(self) -> None:
        pass


def frozen_lake() -> Environment:
    import gymnasium

    return GymnasiumEnvironment(partial(gymnasium.make, "FrozenLake-v1", is_slippery=False, max_episode_steps=20))


def guess_the_number() -> Environment:
    import textarena

    return TextArenaEnvironment(partial(textarena.make, "GuessTheNumber-v0"))


def gsm8k() -> Environment:
    import skyrl_gym

    return SkyRLEnvironment(lambda prompt: skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": "7"}}))


IN_PROCESS: Mapping[str, Make] = {
    "fake": lambda: FakeEnvironment([StepResult(reward=0.5)] * 40 + [StepResult(terminated=True)]),
    "tools": lambda: ToolEnvironment([]),
    "plain functions": lambda: awaitable_environment(PlainGame()),
    "gymnasium": frozen_lake,
    "gem": lambda: GemEnvironment(GemGame),
    "textarena": guess_the_number,
    "skyrl": gsm8k,
}


@pytest.fixture(params=[*IN_PROCESS, "openenv", "nemo_gym"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    match request.param:
        case "openenv":
            with serve(openenv_app()) as url:
                yield lambda: OpenEnvEnvironment(url)
        case "nemo_gym":
            with serve(nemo_gym_app()) as url:
                yield lambda: NemoGymEnvironment(url, tools=NEMO_GYM_TOOLS)
        case name:
            yield IN_PROCESS[name]


def act(text: str) -> Action:
    generation = Generation(token_ids=[1], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)
    return Action(text=text, generation=generation, message=assistant_message(text))


def ask() -> Prompt:
    return Prompt(
        token_ids=(1,), text="Play.", label="1", messages=({"role": "user", "content": "Play."},), metadata={"seed": 1}
    )


async def play(environment: Environment, replies: list[str]) -> list[StepResult]:
    """Until the episode ends, replies over and over."""
    results: list[StepResult] = []
    try:
        start = await environment.reset(ask())
        assert isinstance(start, str) or all("role" in message for message in start)
        while len(results) < TURN_LIMIT:
            results.append(await environment.step(act(replies[len(results) % len(replies)])))
            if results[-1].terminated or results[-1].truncated:
                break
    finally:
        await environment.close()
    return results


def _is_reward(result: StepResult) -> bool:
    """Returns whether a step has a reward, or is the last and asks for the run's."""
    return result.terminated if result.reward is None else math.isfinite(result.reward)


async def test_an_episode_ends_with_finite_rewards(make: Make) -> None:
    environment = make()
    assert isinstance(environment, Environment)
    assert all(isinstance(tool, Tool) for tool in getattr(environment, "tools", ()))
    results = await play(environment, ["[3]", "2", "1"])
    assert results[-1].terminated or results[-1].truncated
    for result in results:
        assert _is_reward(result)
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert isinstance(result.observation, str) or all("role" in message for message in result.observation)


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
async def test_no_reply_raises(make: Make, junk: str) -> None:
    results = await play(make(), [junk])
    assert all(map(_is_reward, results))


async def test_close_at_any_time_and_more_than_once(make: Make) -> None:
    environment = make()
    await environment.close()
    await environment.close()
    environment = make()
    await environment.reset(ask())
    await environment.close()
    await environment.close()


async def test_episodes_at_the_same_time_do_not_disturb_each_other(make: Make) -> None:
    first, *others = await asyncio.gather(*(play(make(), ["[3]", "2", "1"]) for _ in range(4)))
    outcome = [(result.observation, result.reward, result.terminated) for result in first]
    for other in others:
        assert [(result.observation, result.reward, result.terminated) for result in other] == outcome
