"""Rewards from HTTP servers: `POST {query, prompts, labels} -> {rewards, scores, extra_logs}`.

Requests that wait at the same time are sent in one batch. Does not own: the choice of the server, and retries
(`posting`).
"""

import asyncio
from collections.abc import Mapping, Sequence

from attrs import evolve

from rollgrad.adapters.rewards.answers import RewardParser, replies
from rollgrad.adapters.rewards.posting import JudgeServers
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.control.circuit_breaker import Circuit
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import RewardError
from rollgrad.domain.ports.reward_source import RewardSource

LINGER = 0.005
"""Seconds that the first request of a batch waits for others."""
FAILED = "reward_failed"
"""Metric: the share of replies that no server judged, if `failure_value` is set."""
TOKEN_VARIABLE = "ROLLGRAD_REWARD_TOKEN"
"""Environment variable whose value, if set, is sent as a bearer token."""


class HttpReward(RewardSource):
    """Scores replies on the servers `urls`.

    Args:
        urls: where to post; at least one.
        timeout: seconds for one batch, all attempts together.
        batch_size: largest number of replies sent together.
        weights: weights of named rewards.
        failure_value: reward of a reply that no server judged in time (their share is logged as `reward_failed`); None
            raises.
        circuit: circuit breaker of each server.

    Raises:
        ConfigurationError: a URL has no http or https scheme.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        batch_size: int = 64,
        weights: Mapping[str, float] | None = None,
        failure_value: float | None = None,
        circuit: Circuit | None = None,
    ) -> None:
        self._servers = JudgeServers(
            urls,
            name="reward server",
            flag="reward.remote_url",
            timeout=timeout,
            token_variable=TOKEN_VARIABLE,
            circuit=circuit,
        )
        self._batch_size = batch_size
        self._parsers = {url: RewardParser(f"The reward server {url}", weights) for url in urls}
        self._failure_value = failure_value
        self._waiting: list[tuple[RewardRequest, asyncio.Future[Reward]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order.

        Raises:
            RewardError: no server judged in time, and there is no `failure_value`.
        """
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Reward]] = [loop.create_future() for _ in requests]
        self._waiting += zip(requests, answers, strict=True)
        if self._waiting and (self._sender is None or self._sender.done()):
            self._sender = asyncio.create_task(self._send())
        return list(await asyncio.gather(*answers))

    async def aclose(self) -> None:
        """Closes the connections; call it in the event loop that scored."""
        tasks = [*self._batches, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        for _, answer in self._waiting:
            answer.cancel()
        self._waiting.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._servers.aclose()

    async def _send(self) -> None:
        """Sends the waiting requests in batches."""
        await asyncio.sleep(LINGER)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            task = asyncio.create_task(self._settle(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _settle(self, batch: list[tuple[RewardRequest, "asyncio.Future[Reward]"]]) -> None:
        """Gives every request of a batch its answer, however the batch ends; otherwise callers would wait for ever."""
        waiting = [answer for _, answer in batch]
        try:
            with foreign_code(lambda words: RewardError(f"The reward server's answer cannot be used: {words}.")):
                judged = await self._judge([request for request, _ in batch])
                rewards = [self._or_failure_value(reward) for reward in judged]
        except RewardError as error:
            rewards = [self._or_failure_value(error)] * len(batch)
        except BaseException:  # a cancellation
            for answer in waiting:
                answer.cancel()
            raise
        for answer, reward in zip(waiting, rewards, strict=True):
            if answer.done():
                continue
            if isinstance(reward, RewardError):
                answer.set_exception(reward)
            else:
                answer.set_result(reward)

    def _or_failure_value(self, reward: Reward | RewardError) -> Reward | RewardError:
        if self._failure_value is None:
            return reward
        if isinstance(reward, RewardError):
            return Reward(value=self._failure_value, metrics={FAILED: 1.0})
        return evolve(reward, metrics={**reward.metrics, FAILED: 0.0})

    async def _judge(self, requests: list[RewardRequest]) -> list[Reward | RewardError]:
        body = {
            "query": [request.query for request in requests],
            "prompts": [request.prompt.text for request in requests],
            "labels": [request.label for request in requests],
        }
        url, answer = await self._servers.ask(body, about=replies(len(requests)))
        return self._parsers[url].parse_each(answer, len(requests))
