"""Port: judges finished replies."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rollgrad.domain.episodes.rewards import Reward, RewardRequest


@runtime_checkable
class RewardSource(Protocol):
    """Judges replies. Promises: one finite reward for each request, in order; scoring the same request twice is
    harmless.

    Errors: `RewardError` if the source raises, or returns another number of rewards or one that is not finite; its
    subclass `NotApplicableError` if it declares that a reply cannot be judged; `ConfigurationError` if no request could
    ever be judged.
    """

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Judges the requests."""
        ...
