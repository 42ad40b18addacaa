"""Dynamic sampling: which groups are worth training on, and how far to look for more."""

from collections.abc import Sequence

from attrs import frozen

from rollgrad.domain.algorithms.equality import differ

EMPTY = "empty"
"""Why a group without any sample is rejected."""


@frozen(kw_only=True)
class GroupFilter:
    """`score_spread`: keep a group only if its scores differ: one that is neither all right nor all wrong, however that
    is coded (DAPO, Yu et al. 2025, eq. 11); all right is a score of at least `pass_threshold`. `score_range`: keep a
    group only if its mean score lies strictly between the two, None for any. `need_spread`: only if its rewards differ.
    """

    score_spread: bool = False
    pass_threshold: float = 1.0
    score_range: tuple[float, float] | None = None
    need_spread: bool = False

    def rejection(self, scores: Sequence[float], rewards: Sequence[float]) -> str | None:
        """Returns why a group is not trained on (`empty`, `too_hard`, `too_easy`, `no_spread`), or None."""
        if not scores:
            return EMPTY
        if self.score_spread and not differ(scores):
            return "too_easy" if max(scores) >= self.pass_threshold else "too_hard"
        if self.score_range is not None:
            mean = sum(scores) / len(scores)
            if mean <= self.score_range[0]:
                return "too_hard"
            if mean >= self.score_range[1]:
                return "too_easy"
        return "no_spread" if self.need_spread and not differ(rewards) else None
