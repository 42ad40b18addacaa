"""Tokens of replies that are sampled in another process, told here while they come.

One call at a time fetches the new tokens of all replies, so that what a token costs falls with the number of replies
that stream together. Invariant: each token of a reply is told once, in order, and the last before the reply is
returned. Replies that nobody listens to cost nothing.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from attrs import define, field

from rollgrad.domain.episodes.generation import Generation
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import SampleListener, tell

UNKNOWN = (math.nan, 0, False)
"""Log-prob, version and end of a token of which nothing was said."""
Told = tuple[int, float, int, bool]
"""A token as `rollout_engine.tell` tells it, with its log-prob and version, and whether it is the last; without them
the log-prob is NaN."""
News = Mapping[int, Sequence[Told]]
"""Tokens that have not been told, in order, by the number of their reply."""


@define(eq=False)
class _Ear(SampleListener):
    """Keeps the tokens of a reply with how they were sampled."""

    _keep: Callable[[Told], None]
    _next: tuple[float, int, bool] = UNKNOWN

    def sampled(self, logprob: float, version: int, last: bool) -> None:
        self._next = logprob, version, last

    def __call__(self, token: int) -> None:
        (logprob, version, last), self._next = self._next, UNKNOWN
        self._keep((token, logprob, version, last))


@define(eq=False)
class ToldTokens:
    """The end where replies are sampled: keeps tokens until they are fetched."""

    _news: dict[int, list[Told]] = field(factory=dict)
    _some: asyncio.Event = field(factory=asyncio.Event)

    def listener(self, number: int) -> Callable[[int], None]:
        """Returns the `on_token` of a reply; `end` it afterwards."""

        def keep(told: Told) -> None:
            self._news.setdefault(number, []).append(told)
            self._some.set()

        return _Ear(keep)

    def end(self, number: int) -> None:
        """Forgets the tokens of a reply that is returned, or given up; whoever waits for news looks again."""
        self._news.pop(number, None)
        self._some.set()

    async def fetched(self) -> News:
        """Waits for news, and returns them; there are none if a reply has ended."""
        await self._some.wait()
        self._some.clear()
        news, self._news = self._news, {}
        return news


@define(eq=False)
class TokenStreams:
    """The end where tokens are heard.

    Args:
        fetch: returns `ToldTokens.fetched` of the other end; raises `EngineError` if that is lost.
    """

    _fetch: Callable[[], Awaitable[News]]
    _replies: dict[int, Callable[[Told], None]] = field(factory=dict)
    _numbers: Iterator[int] = field(factory=itertools.count)
    _fetching: asyncio.Task[None] | None = None

    async def generate(
        self, sample: Callable[[int], Awaitable[Generation]], on_token: Callable[[int], None]
    ) -> Generation:
        """Returns the reply that `sample(number)` has sampled at the other end, where the tokens are told by that
        number; an error of `on_token` ends it, and no other."""
        number, told = next(self._numbers), 0
        failed: BaseException | None = None
        sampling = asyncio.ensure_future(sample(number))

        def hear(news: Told) -> None:
            nonlocal told, failed
            if failed is None:
                told += 1
                token, logprob, version, last = news
                try:
                    if math.isnan(logprob):
                        on_token(token)
                    else:
                        tell(on_token, token, logprob, version, last=last)
                except BaseException as error:
                    failed = error
                    sampling.cancel()

        self._replies[number] = hear
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._pass_on())
        try:
            generation = await sampling
        except asyncio.CancelledError:
            if failed is not None:
                raise failed from None
            raise
        finally:
            sampling.cancel()
            del self._replies[number]
        for token in generation.token_ids[told:]:  # the reply came before the last news of its tokens
            on_token(token)
        return generation

    async def _pass_on(self) -> None:
        while self._replies:
            try:
                news = await self._fetch()
            except EngineError:
                return  # each call for a reply fails with the same error
            for number, tokens in news.items():
                for token in tokens:
                    if (hear := self._replies.get(number)) is not None:
                        hear(token)
