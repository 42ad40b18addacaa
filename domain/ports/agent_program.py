"""Port: an agent that plays an episode by itself, as a client of the run's agent server."""

import re
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from rollgrad.domain.episodes.prompts import Prompt

ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""Names of roles, which are part of API keys and of metrics."""


@frozen(kw_only=True)
class AgentTask:
    """Task of an agent, and the address of the server that gives it replies."""

    prompt: Prompt
    """Images in its messages are parts `{"type": "image_url", "image_url": {"url": ...}}` with data URIs, as OpenAI's
    clients send them."""
    root_url: str
    """Address of the session, as Anthropic's clients take it; with `/v1` (`base_url`) as OpenAI's do."""
    api_key: str
    """Key of both addresses. With `role_key(ROLE)` in its place the policy answers as one of several roles, each of
    which learns from a reward of its own."""
    model: str
    """Name to ask for."""
    unlearned_key: str = ""
    """Key with which the same policy answers, and nothing is learned from it: as opponent in a game, simulated user or
    judge."""

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients."""
        return f"{self.root_url}/v1"

    def role_key(self, role: str) -> str:
        """Returns the API key with which `role` asks for replies: the episode's, a colon and the name.

        Raises:
            ValueError: the name is no word of at most 64 letters, digits, `-`, `_` and `.`.
        """
        if not ROLE.fullmatch(role):
            raise ValueError(f"The role {role[:80]!r} must be a word of at most 64 letters, digits, '-', '_' and '.'.")
        return f"{self.api_key}:{role}"


@frozen(kw_only=True)
class AgentResult:
    """Result of an episode."""

    answer: str | None = None
    """None: the last reply."""
    reward: float | None = None
    """None: the run's reward judges the answer."""
    metrics: Mapping[str, float] = field(factory=dict)
    rewards: Mapping[str, float] = field(factory=dict)
    """Reward of each role that replied; it excludes the other two."""


@runtime_checkable
class AgentProgram(Protocol):
    """An agent that plays episodes. Promises: cancelling `run` ends everything that it started. An error fails its own
    episode only, but a ConfigurationError ends the run."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Plays one episode; many run at once."""
        ...
