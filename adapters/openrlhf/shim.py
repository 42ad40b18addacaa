"""What agent files import from `openrlhf.utils.agent`, and vLLM-shaped values for those that call the engine
themselves.

`installed()` puts these names where such a file looks for them, while it is loaded, and only if OpenRLHF itself is not
installed.
"""

import contextlib
import copy
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from attrs import define, field


@define
class SamplingParams:
    """The fields of vLLM's sampling parameters that agent files read and set."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True

    def clone(self) -> "SamplingParams":
        """An independent copy."""
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
    """The answer to a request, as vLLM gives it."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(factory=list)


class AgentInstanceBase(ABC):
    """One environment of one episode."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Starts the episode; `observation` is the prompt's text to begin with."""
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answers an action with rewards, environment_feedback and done."""


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
        """The episode's tokens, action ranges, log-probs and reward."""


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
        """For executors that add to it; a class that does not is played by rollgrad's own executor."""
        instance = self.agent_instance_cls()
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens = list(hf_tokenizer(text, add_special_tokens=False)["input_ids"])
        ranges: list[tuple[int, int]] = []
        logprobs, reward = [0.0] * len(tokens), 0.0
        result: dict[str, Any] = {}
        params = sampling_params.clone()
        while not result.get("done") and len(tokens) < max_length:
            params.max_tokens = min(params.max_tokens or max_length, max_length - len(tokens))
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens += output.token_ids
            logprobs += [choice[token].logprob for token, choice in zip(output.token_ids, output.logprobs, strict=True)]
            states = {"observation_text": text, "action_text": output.text, "label": label, "sampling_params": params}
            result = await instance.step(states)
            reward += float(result["rewards"])
            feedback = hf_tokenizer(result.get("environment_feedback") or "", add_special_tokens=False)["input_ids"]
            text += output.text + (result.get("environment_feedback") or "")
            tokens += feedback
            logprobs += [0.0] * len(feedback)
            params = result.get("sampling_params") or params
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens[:max_length],
            "action_ranges": ranges,
            "rollout_log_probs": logprobs[:max_length],
            "truncated": not result.get("done"),
            "reward": reward,
            "scores": result.get("scores", reward),
            "extra_logs": result.get("extra_logs") or {},
        }


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Lets `from openrlhf.utils.agent import ...` find these classes, unless the real package is there."""
    if importlib.util.find_spec("openrlhf") is not None:
        yield
        return
    modules = {name: ModuleType(name) for name in ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")}
    agent = modules["openrlhf.utils.agent"]
    for cls in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor):
        setattr(agent, cls.__name__, cls)
    modules["openrlhf"].utils = modules["openrlhf.utils"]  # type: ignore[attr-defined]
    modules["openrlhf.utils"].agent = agent  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
