"""Port: an agent that plays an episode by itself, as a client of the run's agent server."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from rollgrad.domain.episodes.prompts import Prompt


@frozen(kw_only=True)
class AgentTask:
    """Task of an agent, and the address of the server that gives it replies.

    Images in the messages of `prompt` are parts `{"type": "image_url", "image_url": {"url": ...}}` with data URIs, as
    OpenAI's clients send them.
    `root_url` is the session's address (what Anthropic's clients take), `base_url` the same with `/v1` (what OpenAI's
    take); `api_key` goes with both. `model` is the name to ask for. With `unlearned_key` in the place of `api_key` the
    same policy answers, and nothing is learned from it: as opponent in a game, simulated user or judge.
    """

    prompt: Prompt
    root_url: str
    api_key: str
    model: str
    unlearned_key: str = ""

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients."""
        return f"{self.root_url}/v1"


@frozen(kw_only=True)
class AgentResult:
    """Result of an episode: its `answer` (None: the last reply) and its `reward` (None: the run's reward judges it)."""

    answer: str | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class AgentProgram(Protocol):
    """An agent that plays episodes. Promises: cancelling `run` ends everything that it started. An error fails its own
    episode only, but a ConfigurationError ends the run."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Plays one episode; many run at once."""
        ...
