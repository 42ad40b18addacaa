"""What a reward source is asked, and what it answers; and a rollout that failed, as a value."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import field, frozen

from rollgrad.domain.prompts import Prompt
from rollgrad.domain.sampling import StopReason


@frozen(kw_only=True)
class RewardRequest:
    """One finished reply to judge. `response` is the decoded text without special tokens."""

    prompt: Prompt
    response: str
    stop_reason: StopReason

    @property
    def query(self) -> str:
        """Prompt and response in one text, as reward models and remote scorers take it."""
        return self.prompt.text + self.response

    @property
    def label(self) -> Any:
        """The reference the prompt came with."""
        return self.prompt.label


@frozen(kw_only=True)
class Reward:
    """`value` trains; `score` (default: `value`) filters and evaluates; `metrics` are averaged into the log; `parts`
    are the named rewards that `value` is the weighted sum of, if it is one."""

    value: float
    score: float | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    parts: Mapping[str, float] = field(factory=dict)


class FailureKind(StrEnum):
    """Whose fault a failed rollout is."""

    INFRASTRUCTURE = "infrastructure"
    """Engine, worker or network."""
    ENVIRONMENT = "environment"
    """The environment or a tool raised or hung."""
    REWARD = "reward"
    """The reward source raised, hung or answered nonsense."""
    DATA = "data"
    """The prompt cannot be played (too long, malformed)."""


@frozen(kw_only=True)
class RolloutFailure:
    """A rollout that produced no trajectory; it is counted by `kind`, never dropped silently."""

    kind: FailureKind
    message: str
    group_id: int
    sample_id: int
