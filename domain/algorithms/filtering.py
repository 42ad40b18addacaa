"""Dynamic sampling: the rule that chooses the groups that are trained on."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.algorithms.equality import differ, reaches

EMPTY = "empty"
"""Reason for the rejection of a group without any sample."""
BY_FUNCTION = "by_function"
"""Reason for the rejection of a group by a function of the user's."""


@frozen(kw_only=True)
class GroupFilter:
    """Conditions that a group must meet to be trained on."""

    score_spread: bool = False
    """Its scores differ: its samples are neither all right nor all wrong, whatever scores mean right and wrong (DAPO,
    Yu et al. 2025, eq. 11)."""
    pass_threshold: float = 1.0
    """Score from which a reply is right; it only names the reason of a rejection."""
    score_range: tuple[float, float] | None = None
    """Its mean score lies strictly between the two; None for any."""
    need_spread: bool = False
    """Its rewards differ."""
    keeps: Callable[[Any], object] | None = None
    """A function of the user's returns true; it is asked about groups that meet the other conditions."""

    def rejection(self, scores: Sequence[float], rewards: Sequence[float]) -> str | None:
        """Returns the reason why a group is not trained on (`empty`, `too_hard`, `too_easy`, `no_spread`), or None."""
        if not scores:
            return EMPTY
        if self.score_spread and not differ(scores):
            return "too_easy" if reaches(max(scores), self.pass_threshold) else "too_hard"
        if self.score_range is not None:
            mean = sum(scores) / len(scores)
            if mean <= self.score_range[0]:
                return "too_hard"
            if mean >= self.score_range[1]:
                return "too_easy"
        return "no_spread" if self.need_spread and not differ(rewards) else None
