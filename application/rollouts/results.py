"""Results of episodes, which an evaluation counts: little beside the replies, and kept in a file of them."""

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory


@frozen(kw_only=True)
class EpisodeResult:
    """Result of an episode, over all its branches: `sampled_tokens` is their number, `truncated` whether a bound cut
    one off; the rest is as in `Trajectory`."""

    score: float
    sampled_tokens: int
    truncated: bool
    answer: str | None = None
    reward_parts: Mapping[str, float] = field(factory=dict)
    metrics: Mapping[str, float] = field(factory=dict)

    @classmethod
    def of(cls, branches: Sequence[Trajectory]) -> "EpisodeResult":
        """Returns the result of an episode's branches."""
        names = dict.fromkeys(name for branch in branches for name in branch.reward_parts)
        return cls(
            score=branches[0].score,
            sampled_tokens=sum(branch.action_length for branch in branches),
            truncated=any(branch.stop_reason.truncated for branch in branches),
            answer=branches[0].answer,
            reward_parts={name: math.fsum(b.reward_parts.get(name, 0.0) for b in branches) for name in names},
            metrics=branches[0].metrics,
        )


@frozen(kw_only=True)
class PromptResult:
    """Results of the episodes of a prompt, in the order of their samples, and those that failed."""

    group_id: int
    datasource: str
    episodes: tuple[EpisodeResult, ...]
    failures: tuple[RolloutFailure, ...] = ()

    @classmethod
    def of(cls, group: RolloutGroup) -> "PromptResult":
        """Returns the results of a group."""
        return cls(
            group_id=group.group_id,
            datasource=group.prompt.datasource,
            episodes=tuple(map(EpisodeResult.of, group.samples)),
            failures=group.failures,
        )

    @property
    def scores(self) -> list[float]:
        """Score of each episode."""
        return [episode.score for episode in self.episodes]
