"""A `RewardSource` that asks a function of one request."""

import math
from collections.abc import Callable, Sequence

from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.reward_source import RewardSource


def reply_equals_label(request: RewardRequest) -> float:
    """1.0 when reply and label are the same text."""
    return float(request.response.strip() == str(request.label))


class FakeRewardSource(RewardSource):
    """Rewards each request with `value(request)`; keeps every request it was asked about."""

    def __init__(self, value: Callable[[RewardRequest], float] = reply_equals_label) -> None:
        self._value = value
        self.requests: list[RewardRequest] = []

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward a request, in order.

        Raises:
            RewardError: a value is not finite.
        """
        self.requests.extend(requests)
        values = [float(self._value(request)) for request in requests]
        if not all(map(math.isfinite, values)):
            raise RewardError(f"The fake reward returned {values}: each must be finite.")
        return [Reward(value=value) for value in values]
