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
    """Task of an agent, and the address of the server that gives it replies.

    Images in the messages of `prompt` are parts `{"type": "image_url", "image_url": {"url": ...}}` with data URIs, as
    OpenAI's clients send them.
    `root_url` is the session's address (what Anthropic's clients take), `base_url` the same with `/v1` (what OpenAI's
    take); `api_key` goes with both. `model` is the name to ask for. With `unlearned_key` in the place of `api_key` the
    same policy answers, and nothing is learned from it: as opponent in a game, simulated user or judge. With
    `role_key(ROLE)` it answers as one of several roles, each of which learns from a reward of its own.
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
    """Result of an episode: its `answer` (None: the last reply) and its `reward` (None: the run's reward judges it).
    `rewards` has one for each role that replied, and excludes the other two."""

    answer: str | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    rewards: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class AgentProgram(Protocol):
    """An agent that plays episodes. Promises: cancelling `run` ends everything that it started. An error fails its own
    episode only, but a ConfigurationError ends the run."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Plays one episode; many run at once."""
        ...
