"""Port: judges finished replies."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rollgrad.domain.episodes.rewards import Reward, RewardRequest


@runtime_checkable
class RewardSource(Protocol):
    """Promises: one reward a request, in order, each finite; scoring the same request twice is harmless.

    Errors: `RewardError` when the source raises, answers with another length, or with a number that is not finite;
    `NotApplicableError`, one of them, when it says of a reply that it cannot be judged; `ConfigurationError` when no
    request could ever be judged.
    """

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Judges the requests."""
        ...
