"""A reward of 0 for every reply, for learning from a teacher alone."""

from collections.abc import Sequence

from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.ports.reward_source import RewardSource


class NoReward(RewardSource):
    """A `RewardSource` that returns 0 for every reply."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns 0 for each request."""
        return [Reward(value=0.0) for _ in requests]
