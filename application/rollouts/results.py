"""Results of episodes, which an evaluation counts: little beside the replies, and kept in a file of them."""

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from rollgrad.application.rollouts.groups import RolloutGroup, episode_score
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory


@frozen(kw_only=True)
class EpisodeResult:
    """Result of a branch of an episode, or of the whole: `sampled_tokens` is their number, `truncated` whether a bound
    cut it off; the rest is as in `Trajectory`."""

    score: float
    sampled_tokens: int
    truncated: bool
    role: str = ""
    answer: str | None = None
    reward_parts: Mapping[str, float] = field(factory=dict)
    metrics: Mapping[str, float] = field(factory=dict)

    @classmethod
    def of_branch(cls, branch: Trajectory) -> "EpisodeResult":
        """Returns the result of one branch."""
        return cls(
            score=branch.score,
            sampled_tokens=branch.action_length,
            truncated=branch.stop_reason.truncated,
            role=branch.role,
            answer=branch.answer,
            reward_parts=branch.reward_parts,
            metrics=branch.metrics,
        )

    @classmethod
    def of_episode(cls, branches: Sequence["EpisodeResult"]) -> "EpisodeResult":
        """Returns the result of an episode of these branches, whose score is that of `episode_score`."""
        names = dict.fromkeys(name for branch in branches for name in branch.reward_parts)
        return cls(
            score=episode_score(branches),
            sampled_tokens=sum(branch.sampled_tokens for branch in branches),
            truncated=any(branch.truncated for branch in branches),
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
            episodes=tuple(
                EpisodeResult.of_episode([*map(EpisodeResult.of_branch, sample)]) for sample in group.samples
            ),
            failures=group.failures,
        )

    @property
    def scores(self) -> list[float]:
        """Score of each episode."""
        return [episode.score for episode in self.episodes]
