"""For learning from a teacher alone: every reply is worth 0."""

from collections.abc import Sequence

from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.rewards import Reward, RewardRequest


class NoReward(RewardSource):
    """See `RewardSource`."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """0 for each request."""
        return [Reward(value=0.0) for _ in requests]
