"""Names that agent files import from `openrlhf.utils.agent`, and vLLM-shaped values for files that call the engine
themselves. `adapters.system.stand_ins` makes the import find them.
"""

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from attrs import define, field

from rollgrad.adapters.openrlhf.answers import metrics, number, required


@define
class SamplingParams:
    """The fields of vLLM's sampling parameters that agent files read and set. Fields from `n` on can only be read: a
    request with another value is refused."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = False

    def clone(self) -> "SamplingParams":
        """Returns an independent copy."""
        return copy.deepcopy(self)


@define
class Logprob:
    """One token's log-prob, as vLLM reports it."""

    logprob: float


@define
class CompletionOutput:
    """One completion, as vLLM reports it."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0


@define
class RequestOutput:
    """The answer to a request, as vLLM returns it."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(factory=list)


class AgentInstanceBase(ABC):
    """One environment of one episode. `__init__` may be a coroutine function: it runs before `reset`."""

    _start: Callable[[], Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        initialise = cls.__dict__.get("__init__")
        if inspect.iscoroutinefunction(initialise):

            def later(self: "AgentInstanceBase", *args: Any, **kwargs: Any) -> None:
                self._start = functools.partial(initialise, self, *args, **kwargs)

            setattr(cls, "__init__", later)  # noqa: B010  (mypy refuses to let a method be assigned)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Starts the episode; `observation` in `states` is the prompt's text."""
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answers an action with rewards, environment_feedback and done."""


async def open_episode(instance: Any, prompt: str, label: Any) -> str:
    """Starts an episode of `instance`; returns the text that it begins with.

    Raises:
        ValueError: `reset` returned no observation.
    """
    start = getattr(instance, "_start", None)
    if start is not None:
        await start()
    answer = await instance.reset({"observation": prompt, "label": label})
    return str(required(answer, "observation", "reset()"))


class AgentExecutorBase(ABC):
    """Plays an episode by itself."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Returns the episode's tokens, action ranges, log-probs and reward."""


@define
class _Episode:
    """The record of an episode of several turns, as far as it has been played."""

    text: str = ""
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    """A log-prob for each token, 0 where the policy did not sample it."""
    ranges: list[tuple[int, int]] = field(factory=list)
    """The positions of each action."""
    earned: float = 0.0
    """Sum of all rewards."""
    reward: float | None = 0.0
    """`earned`; None if the last step had no reward, so that the run's reward judges the episode."""
    score: Any = None
    logs: dict[str, float] = field(factory=dict)

    def write(self, text: str, hf_tokenizer: Any) -> None:
        """Appends text that the policy did not sample."""
        written = list(hf_tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        self.text += text
        self.tokens += written
        self.logprobs += [0.0] * len(written)

    def act(self, action: CompletionOutput) -> None:
        """Appends what the policy sampled."""
        pairs = zip(action.token_ids, action.logprobs, strict=True)
        self.ranges.append((len(self.tokens), len(self.tokens) + len(action.token_ids)))
        self.text += action.text
        self.tokens += action.token_ids
        self.logprobs += [choices[token].logprob for token, choices in pairs]

    def judge(self, answer: Any) -> None:
        """Notes the rewards, scores and logs of a step's answer."""
        given = answer.get("rewards")
        self.earned += 0.0 if given is None else number(given, "rewards")
        self.reward = None if given is None else self.earned
        self.score = answer.get("scores")
        self.logs |= metrics(answer.get("extra_logs"))


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays `agent_instance_cls` turn by turn."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Plays the episode, for subclasses that extend it; any other class is played by rollgrad's own executor."""
        instance = self.agent_instance_cls()
        episode = _Episode()
        episode.write(await open_episode(instance, prompt, label), hf_tokenizer)
        params, done = sampling_params.clone(), False
        while not done and len(episode.tokens) < max_length:
            turn = params.clone()
            turn.max_tokens = min(turn.max_tokens or max_length, max_length - len(episode.tokens))
            action = (await llm_engine.generate(episode.tokens, turn)).outputs[0]
            states = {
                "observation_text": episode.text,
                "action_text": action.text,
                "label": label,
                "sampling_params": params,
            }
            episode.act(action)
            answer = await instance.step(states)
            done = bool(required(answer, "done", "step()"))
            episode.judge(answer)
            episode.write("" if done else str(answer.get("environment_feedback") or ""), hf_tokenizer)
            params = answer.get("sampling_params") or params
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": episode.tokens[:max_length],
            "action_ranges": episode.ranges,
            "rollout_log_probs": episode.logprobs[:max_length],
            "truncated": not done,
            "reward": episode.reward,
            "scores": episode.reward if episode.score is None else episode.score,
            "extra_logs": episode.logs,
        }
