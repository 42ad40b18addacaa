"""For learning from a teacher alone: every reply is worth 0."""

from collections.abc import Sequence

from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.ports.reward_source import RewardSource


class NoReward(RewardSource):
    """See `RewardSource`."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """0 for each request."""
        return [Reward(value=0.0) for _ in requests]
