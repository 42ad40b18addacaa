"""An OpenRLHF agent instance as an `Environment`."""

from typing import Any

from attrs import evolve

from rollgrad.adapters.chat.image_marks import listed_images
from rollgrad.adapters.openrlhf.answers import metrics, number, required
from rollgrad.adapters.openrlhf.shim import SamplingParams as AgentSampling
from rollgrad.adapters.openrlhf.shim import open_episode
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import Environment, StepResult, WholePrompt

UNLIMITED = -1
"""vLLM's top_k for the full distribution."""
NEUTRAL = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "ignore_eos": False,
}
"""Settings of vLLM that change sampling and that no engine here supports, each with the only value that is accepted."""


class AgentInstanceEnvironment(Environment):
    """Plays `instance`, an `AgentInstanceBase`. Feedback after the last turn is not appended. If
    several turns log a value under one name, the last is kept.
    `params`: the run's sampling settings, which the instance may read, and replace for its later turns.
    """

    def __init__(self, instance: Any, params: SamplingParams) -> None:
        self._instance = instance
        self._params = params
        self._shown = to_agent(params)
        self._text = ""
        self._label: Any = None
        self._metrics: dict[str, float] = {}

    async def reset(self, prompt: Prompt) -> str:
        """Starts the episode; the instance's text follows the prompt, or replaces it."""
        self._label = prompt.label
        observation = await open_episode(self._instance, prompt.text, prompt.label)
        self._text = observation
        if observation.startswith(prompt.text):
            return observation[len(prompt.text) :]
        return WholePrompt(observation)

    async def step(self, action: Action) -> StepResult:
        """Answers an action; without `rewards`, or with None, the run's reward judges the episode.

        Raises:
            ValueError: the instance's result violates its contract.
            ConfigurationError: it sets something that no engine here supports.
        """
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": self._shown,
        }
        answer = await self._instance.step(states)
        done = bool(required(answer, "done", "step()"))
        reward = answer.get("rewards")
        feedback = str(answer.get("environment_feedback") or "")
        self._text += action.text + feedback
        replaced = answer.get("sampling_params")
        if replaced is not None:
            self._shown = replaced
        score = answer.get("scores")
        self._metrics |= metrics(answer.get("extra_logs"))
        return StepResult(
            observation=feedback,
            images=listed_images(answer.get("environment_images")),
            reward=None if reward is None else number(reward, "rewards"),
            terminated=done,
            score=None if score is None else number(score, "scores"),
            metrics=dict(self._metrics),
            sampling=from_agent(self._shown, self._params),
        )

    async def close(self) -> None:
        """Calls the instance's own `close`, if it has one."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            result = close()
            if hasattr(result, "__await__"):
                await result


def to_agent(params: SamplingParams) -> AgentSampling:
    """Returns sampling settings in the form that agent files read."""
    return AgentSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or UNLIMITED,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        stop=list(params.stop_strings) or None,
        stop_token_ids=list(params.stop_token_ids) or None,
        seed=params.seed,
    )


def from_agent(agent: Any, base: SamplingParams) -> SamplingParams:
    """Returns the sampling settings after an agent file's changes; the seed stays the run's own.

    Raises:
        ConfigurationError: a setting is set that no engine here supports.
    """
    for name, neutral in NEUTRAL.items():
        value = getattr(agent, name, neutral)
        if value is not None and value != neutral:
            raise ConfigurationError(
                f"The agent sets {name}={value!r} in its sampling parameters, but only {neutral!r} is possible: leave "
                "it out."
            )
    return evolve(
        base,
        temperature=float(agent.temperature),
        top_p=float(agent.top_p),
        top_k=max(0, int(agent.top_k)),
        max_new_tokens=int(agent.max_tokens or base.max_new_tokens),
        min_new_tokens=int(agent.min_tokens or 0),
        stop_strings=(agent.stop,) if isinstance(agent.stop, str) else tuple(agent.stop or ()),
        stop_token_ids=tuple(agent.stop_token_ids or ()),
    )
