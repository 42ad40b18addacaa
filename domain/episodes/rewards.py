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
    """One finished reply to judge.

    `response` is the reply's text without special tokens, which verifiers read. `query` is prompt and reply in one text
    as the model saw and wrote them, special tokens included; it begins with the prompt's text, and defaults to that
    text and `response`. `token_ids` are the tokens of `query`; None for an answer that no model sampled as such
    (one that an agent took from a reply). `response_token_ids` are those of the reply. `completion` is the reply as
    chat messages, by default one. `images` are those of `query`, in the order of their tokens; their places are among
    `token_ids`, where these are known. `step` is the version of the policy that wrote the reply.
    """

    prompt: Prompt
    response: str
    stop_reason: StopReason
    query: str = field(default=Factory(lambda self: self.prompt.text + self.response, takes_self=True))
    token_ids: tuple[int, ...] | None = None
    response_token_ids: tuple[int, ...] = ()
    completion: tuple[Message, ...] = field(
        default=Factory(lambda self: (assistant_message(self.response),), takes_self=True)
    )
    images: PlacedImages = ()
    step: int = 0

    @property
    def label(self) -> Any:
        """The prompt's label."""
        return self.prompt.label


@frozen(kw_only=True)
class RewardInput:
    """A reply as a reward model reads it: the `query` of a request, its `token_ids` where they are known, the last
    `reply` in it, and its `images`."""

    text: str
    token_ids: tuple[int, ...] | None = None
    reply: str = ""
    images: PlacedImages = ()


@frozen(kw_only=True)
class Reward:
    """`value` trains; `score` (default: `value`) filters and evaluates; `metrics` are averaged into the log; `parts`
    are the named rewards that `value` is the weighted sum of, if it is one; `answer` is what the reply answered, in a
    form in which equal answers are equal texts, by which evaluations vote, None if unknown; `steps` the probabilities
    that a process reward model gives the reply's steps of being right; `feedback` is what there is to say of the reply
    in words, such as the error of a program, which a teacher may be told."""

    value: float
    score: float | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    parts: Mapping[str, float] = field(factory=dict)
    answer: str | None = None
    steps: tuple[float, ...] = ()
    feedback: str | None = None


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
