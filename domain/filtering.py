"""Dynamic sampling: which groups are worth training on, and how far to look for more."""

from collections.abc import Sequence

from attrs import frozen

EMPTY = "empty"
"""Why a group without any sample is rejected."""


@frozen(kw_only=True)
class GroupFilter:
    """`score_range`: keep a group whose mean score lies strictly between the two (DAPO, Yu et al. 2025, eq. 11), None
    for any. `need_spread`: keep a group only if its rewards differ."""

    score_range: tuple[float, float] | None = None
    need_spread: bool = False

    def rejection(self, scores: Sequence[float], rewards: Sequence[float]) -> str | None:
        """Why a group is not trained on (`empty`, `too_hard`, `too_easy`, `no_spread`), or None."""
        if not scores:
            return EMPTY
        if self.score_range is not None:
            mean = sum(scores) / len(scores)
            if mean <= self.score_range[0]:
                return "too_hard"
            if mean >= self.score_range[1]:
                return "too_easy"
        if self.need_spread and min(rewards) == max(rewards):
            return "no_spread"
        return None
