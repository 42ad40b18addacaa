"""Rewards from HTTP servers: `POST {query, prompts, labels} -> {rewards, scores, extra_logs}`.

Requests that wait together travel together; each batch goes to the server with the fewest batches in flight whose
circuit is closed. Judging twice is harmless, so a batch is sent again, first to the servers that it has not been to,
when a connection breaks or a server answers 429 or 5xx. All of it happens within one deadline.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from rollgrad.adapters.rewards.answers import RewardParser, replies
from rollgrad.domain.circuit import Circuit
from rollgrad.domain.errors import ConfigurationError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.rewards import Reward, RewardRequest

if TYPE_CHECKING:
    import httpx2

LINGER = 0.005
"""Seconds that the first request of a batch waits for others."""
ATTEMPTS = 4
"""Times that a batch is sent at most to one server; every further server adds one."""
BACKOFF = 0.2
"""Seconds before the second attempt, and their random part; each further one doubles them."""
FAILED = "reward_failed"
"""Metric: the share of replies that no server judged, where there is a `failure_value`."""
TOKEN_VARIABLE = "ROLLGRAD_REWARD_TOKEN"
"""Environment variable whose value, if set, is sent as a bearer token."""


@define(eq=False)
class _Server:
    url: str
    circuit: Circuit = field(factory=Circuit)
    in_flight: int = 0


class _TransientError(Exception):
    """The attempt failed in a way that another may not."""


class HttpReward(RewardSource):
    """Scores replies on the servers `urls`.

    Args:
        urls: where to post; at least one.
        timeout: seconds for one batch, all attempts together.
        batch_size: replies sent together at most.
        weights: of named rewards.
        failure_value: reward of a reply that no server judged in time (their share is logged as `reward_failed`); None
            raises.
        circuit: when a server is left alone.

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
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(
                    f"reward.remote_url is {url!r}, but a server's address starts with http:// or https://: correct "
                    "--reward.remote_url."
                )
        self._servers = [_Server(url, circuit or Circuit()) for url in urls]
        self._timeout = timeout
        self._batch_size = batch_size
        self._parsers = {url: RewardParser(f"The reward server {url}", weights) for url in urls}
        self._failure_value = failure_value
        self._waiting: list[tuple[RewardRequest, asyncio.Future[Reward]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """One reward a request, in order.

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
        """Ends connections; call it in the event loop that scored."""
        tasks = [*self._batches, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _send(self) -> None:
        """Turns what waits into batches."""
        await asyncio.sleep(LINGER)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            task = asyncio.create_task(self._settle(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _settle(self, batch: list[tuple[RewardRequest, "asyncio.Future[Reward]"]]) -> None:
        """Gives every request of a batch its answer."""
        waiting = [answer for _, answer in batch]
        try:
            rewards = await self._judge([request for request, _ in batch])
            if self._failure_value is not None:
                rewards = [evolve(reward, metrics={**reward.metrics, FAILED: 0.0}) for reward in rewards]
        except RewardError as error:
            if self._failure_value is None:
                for answer in waiting:
                    if not answer.done():
                        answer.set_exception(error)
                return
            rewards = [Reward(value=self._failure_value, metrics={FAILED: 1.0}) for _ in batch]
        for answer, reward in zip(waiting, rewards, strict=True):
            if not answer.done():
                answer.set_result(reward)

    async def _judge(self, requests: list[RewardRequest]) -> list[Reward]:
        import stamina

        last = "none has answered yet"
        attempts = ATTEMPTS + len(self._servers) - 1
        tried: list[_Server] = []
        try:
            async with asyncio.timeout(self._timeout):
                async for attempt in stamina.retry_context(
                    on=_TransientError, attempts=attempts, timeout=None, wait_initial=BACKOFF, wait_jitter=BACKOFF
                ):
                    with attempt:
                        tried.append(await self._next_server(tried))
                        try:
                            return await self._post(tried[-1], requests)
                        except _TransientError as failure:
                            last = str(failure)
                            raise
        except TimeoutError:
            raise RewardError(
                f"No reward server judged {replies(len(requests))} within {self._timeout:g} s (last: {last}): check "
                "the servers, or raise --reward.timeout."
            ) from None
        except _TransientError:
            pass
        raise RewardError(f"The reward servers failed {attempts} times (last: {last}): check the servers.")

    async def _next_server(self, tried: Sequence[_Server]) -> _Server:
        """The least busy server whose circuit lets a call through, rather one that is not among `tried`; waits for
        one."""
        while True:
            now = time.monotonic()
            ready = [server for server in self._servers if server.circuit.allows(now)]
            if ready:
                chosen = min(ready, key=lambda server: (server in tried, server.in_flight))
                chosen.circuit = chosen.circuit.started(now)
                return chosen
            await asyncio.sleep(BACKOFF / 2)

    async def _post(self, server: _Server, requests: list[RewardRequest]) -> list[Reward]:
        """One attempt.

        Raises:
            _TransientError: another attempt may succeed.
            RewardError: it cannot.
        """
        import httpx2

        body = {
            "query": [request.query for request in requests],
            "prompts": [request.prompt.text for request in requests],
            "labels": [request.label for request in requests],
        }
        server.in_flight += 1
        try:
            response = await self._http().post(server.url, json=body)
        except httpx2.HTTPError as error:
            server.circuit = server.circuit.failed(time.monotonic())
            raise _TransientError(f"{server.url}: {type(error).__name__} {error}".strip()) from error
        except asyncio.CancelledError:  # the deadline: a server that hangs is a broken one
            server.circuit = server.circuit.failed(time.monotonic())
            raise
        finally:
            server.in_flight -= 1
        if response.status_code == 429 or response.status_code >= 500:
            server.circuit = server.circuit.failed(time.monotonic())
            raise _TransientError(f"{server.url} answered {response.status_code}")
        server.circuit = server.circuit.succeeded()
        if response.status_code != 200:
            raise RewardError(
                f"The reward server {server.url} answered {response.status_code} ({response.text[:200]!r}): check "
                "--reward.remote_url and what the server expects."
            )
        try:
            answer: Any = response.json()
        except json.JSONDecodeError as error:
            raise RewardError(
                f"The reward server {server.url} answered {response.text[:200]!r}, which is no JSON: it must answer "
                '{"rewards": [...]}.'
            ) from error
        return self._parsers[server.url].parse(answer, len(requests))

    def _http(self) -> "httpx2.AsyncClient":
        import httpx2

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to the loop that opened them
            self._loop = loop
            token = os.environ.get(TOKEN_VARIABLE)
            # asyncio.timeout in _judge is the deadline: a read timeout of the client's own would only get in its way.
            self._client = httpx2.AsyncClient(
                timeout=None, headers={"Authorization": f"Bearer {token}"} if token else None
            )
        return self._client
