"""A rule by which a sign is seen in the metrics of one step, and the settings of a run that it may depend on. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

Metrics = Mapping[str, float]


@frozen(kw_only=True)
class LearningSettings:
    """Settings of a run that findings depend on."""

    steps: int
    """Rollouts of the whole run."""
    judged_by_outcome: bool = True
    """Whether advantages come from the rewards of whole replies, rather than from a teacher or from single turns."""
    compared_in_groups: bool = True
    """Whether a reply's advantage compares it with others to the same prompt."""
    pass_threshold: float = 1.0
    """Score from which a reply passes."""
    max_new_tokens: int = 1024
    """Length at which a reply is truncated."""
    held_by_kl: bool = False
    """Whether a KL term holds the policy near its reference, which knows no more than it."""
    kl_in_reward: bool = False
    """Whether that term is part of the reward."""
    evaluations_since: int = 0
    """Step from which on evaluations have the settings that they have now."""

    @property
    def one_token(self) -> bool:
        """Whether a reply is one token, such as a choice among answers."""
        return self.max_new_tokens == 1


@frozen(kw_only=True)
class Rule:
    """Rule of one finding."""

    sign: Callable[[Metrics, LearningSettings], Any]
    """Returns a value if the step shows the sign, else None; a streak consists of equal values."""
    describe: Callable[[Metrics, LearningSettings, int], tuple[str, str]]
    """Returns evidence, and settings to look at, from the latest metrics and the number of rollouts in the streak."""
    no_update: bool = False
    """Whether the sign means that the weights do not change: then it is reported of runs shorter than the window,
    too."""


def in_rollouts(count: int) -> str:
    """Returns how many rollouts had a sign, in words."""
    return "the rollout" if count == 1 else f"{count} rollouts in a row"


def in_steps(count: int) -> str:
    """Returns how many steps had a sign, in words."""
    return "the step" if count == 1 else f"{count} steps in a row"
