"""Request and answer of a reward source; and a failed rollout as a value."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import Factory, field, frozen

from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message, assistant_message
from rollgrad.domain.episodes.prompts import Prompt


@frozen(kw_only=True)
class RewardRequest:
    """One finished reply to judge."""

    prompt: Prompt
    response: str
    """Text of the reply without special tokens, which verifiers read."""
    stop_reason: StopReason
    query: str = field(default=Factory(lambda self: self.prompt.text + self.response, takes_self=True))
    """Prompt and reply in one text as the model saw and wrote them, special tokens included. It begins with the
    prompt's text, and is that text and `response` by default."""
    token_ids: tuple[int, ...] | None = None
    """Tokens of `query`; None for an answer that no model sampled as such (one that an agent took from a reply)."""
    response_token_ids: tuple[int, ...] = ()
    """Tokens of the reply."""
    completion: tuple[Message, ...] = field(
        default=Factory(lambda self: (assistant_message(self.response),), takes_self=True)
    )
    """The reply as chat messages; by default one."""
    images: PlacedImages = ()
    """Images of `query`, in the order of their tokens; their places are among `token_ids`, where these are known."""
    step: int = 0
    """Version of the policy that wrote the reply."""

    @property
    def label(self) -> Any:
        """The prompt's label."""
        return self.prompt.label


@frozen(kw_only=True)
class RewardInput:
    """A reply as a reward model reads it."""

    text: str
    """The `query` of a request."""
    token_ids: tuple[int, ...] | None = None
    """Its tokens, where they are known."""
    reply: str = ""
    """The last reply in it."""
    images: PlacedImages = ()
    """Its images."""


@frozen(kw_only=True)
class Reward:
    """Judgement of a reply by a reward source."""

    value: float
    """Number that trains."""
    score: float | None = None
    """Number that filters and evaluates; None takes `value`."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Numbers that are averaged into the log."""
    parts: Mapping[str, float] = field(factory=dict)
    """Named rewards, if `value` is their weighted sum."""
    answer: str | None = None
    """Answer of the reply, by which evaluations vote: equal answers are equal texts. None if unknown."""
    steps: tuple[float, ...] = ()
    """Probabilities of a process reward model that the steps of the reply are right."""
    feedback: str | None = None
    """Words on the reply, such as the error of a program; a teacher may be told them. None for none."""


class FailureKind(StrEnum):
    """Origin of a rollout's failure."""

    INFRASTRUCTURE = "infrastructure"
    """Engine, worker or network."""
    ENVIRONMENT = "environment"
    """The environment or a tool raised or hung."""
    REWARD = "reward"
    """The reward source raised, hung or answered nonsense."""
    NOT_APPLICABLE = "not_applicable"
    """No reward applies to the reply: a reward function returned None. It does not count against the failure budget."""
    DATA = "data"
    """The prompt cannot be played (too long, malformed)."""


@frozen(kw_only=True)
class RolloutFailure:
    """A rollout that produced no trajectory; it is counted by `kind`, never dropped silently."""

    kind: FailureKind
    message: str
    group_id: int
    sample_id: int
