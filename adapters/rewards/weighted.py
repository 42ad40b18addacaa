"""One reward from several: functions, verifiers, models and servers that judge the same reply, each with a weight.

Invariant: the result is what one function that returns all of them by name would give: its parts are the named rewards,
its value their weighted sum. Each source keeps its own deadline. Does not own: how a source judges.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence

from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, NotApplicableError
from rollgrad.domain.ports.closing import AsyncClosable, Closable
from rollgrad.domain.ports.reward_source import RewardSource


class WeightedRewards(RewardSource):
    """The sum of what the `sources` give to a reply, each times its weight (default: 1 each).

    The part of a source has the source's name; one that gives named rewards itself brings these instead, each of which
    has a weight of its own. A source that does not apply to a reply adds 0 to it. The first source that says what a
    reply answered is believed.
    """

    def __init__(self, sources: Mapping[str, RewardSource], weights: Mapping[str, float] | None = None) -> None:
        self.sources = sources
        self._weights = weights

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order.

        Raises:
            NotApplicableError: no source applies to a reply.
            RewardError: a source gave no reward.
            ConfigurationError: two sources give rewards of the same name, or the weights have other names.
        """
        return list(await asyncio.gather(*map(self._judged, requests)))

    async def _judged(self, request: RewardRequest) -> Reward:
        # All are waited for, so that none is left running behind an error of another.
        answers = await asyncio.gather(
            *(source.score([request]) for source in self.sources.values()), return_exceptions=True
        )
        given: dict[str, Reward] = {}
        for name, answer in zip(self.sources, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, NotApplicableError):
                    raise answer
                continue
            (given[name],) = answer
        if not given:
            raise NotApplicableError(f"None of the rewards {', '.join(self.sources)} applies to the reply.")
        return self._sum(given)

    async def aclose(self) -> None:
        """Closes the sources that can be closed."""
        for source in self.sources.values():
            if isinstance(source, AsyncClosable):
                await source.aclose()
            elif isinstance(source, Closable):
                source.close()

    def _sum(self, given: Mapping[str, Reward]) -> Reward:
        named = [
            (name, value)
            for source, reward in given.items()
            for name, value in (reward.parts or {source: reward.value}).items()
        ]
        parts = dict(named)
        if len(parts) < len(named):
            names = [name for name, _ in named]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(f"Two rewards are called {twice}: give one of them another name.")
        if len(given) < len(self.sources):  # what does not apply counts 0, as in TRL
            absent = self._weights or [source for source in self.sources if source not in given]
            parts.update({name: 0.0 for name in absent if name not in parts})
        if self._weights is not None and parts.keys() != self._weights.keys():
            raise ConfigurationError(
                f"The rewards are {', '.join(parts)}, but reward.weights names {', '.join(self._weights)}: give one "
                "weight to each with --reward.weights."
            )
        rewards = list(given.values())
        return Reward(
            value=math.fsum(self._weight(name) * value for name, value in parts.items()),
            score=math.fsum(self._score(source, reward) for source, reward in given.items()),
            metrics={name: number for reward in rewards for name, number in reward.metrics.items()} | parts,
            parts=parts,
            answer=next((reward.answer for reward in rewards if reward.answer is not None), None),
            steps=next((reward.steps for reward in rewards if reward.steps), ()),
            feedback="\n".join(reward.feedback for reward in rewards if reward.feedback) or None,
        )

    def _score(self, source: str, reward: Reward) -> float:
        """Returns a source's share of the score: what it says, or else its share of the reward."""
        own = reward.value if reward.score is None else reward.score
        if not reward.parts:
            return self._weight(source) * own
        if own != reward.value:  # its score is of all its parts, and no weight is of that
            return own
        return math.fsum(self._weight(name) * value for name, value in reward.parts.items())

    def _weight(self, name: str) -> float:
        return 1.0 if self._weights is None else self._weights[name]
