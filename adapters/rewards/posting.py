"""Requests to judging servers, in JSON, over several addresses, with retries within one deadline.

A request goes to the server with the fewest requests in flight whose circuit is closed. Judging twice is harmless, so a
request is sent again, preferably to another server, when a connection breaks or a server answers 429 or 5xx. Does not
own: the content of requests and answers.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from rollgrad.adapters.system.retries import PassingError, attempts
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.application.rare_warning import RareWarning
from rollgrad.domain.addresses import address_problem
from rollgrad.domain.control.circuit_breaker import Circuit
from rollgrad.domain.errors import ConfigurationError, RewardError

if TYPE_CHECKING:
    import httpx2

ATTEMPTS = 4
"""Largest number of attempts with one server; every further server adds one."""
BACKOFF = 0.2
"""Seconds before the second attempt, and their random part; each further one doubles them."""
QUOTED = 200
"""Largest number of characters of an answer in an error."""


@define(eq=False)
class _Server:
    url: str
    circuit: Circuit = field(factory=Circuit)
    in_flight: int = 0


class JudgeServers:
    """Asks the servers `urls`.

    Args:
        urls: where to post; at least one.
        name: of such a server, for errors ("reward server").
        flag: the setting that names them.
        timeout: seconds for one question, all attempts together.
        token_variable: environment variable whose value, if set, is sent as a bearer token.
        circuit: circuit breaker of each server.
    Raises:
        ConfigurationError: a URL cannot be requested.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        flag: str,
        timeout: float,
        token_variable: str,
        circuit: Circuit | None = None,
    ) -> None:
        for url in urls:
            if (problem := address_problem(url, flag)) is not None:
                raise ConfigurationError(problem)
        self._servers = [_Server(url, circuit or Circuit()) for url in urls]
        self._name = name
        self._flag = flag
        self._timeout = timeout
        self._token_variable = token_variable
        self._failures = RareWarning()
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, body: Mapping[str, Any], *, about: str) -> tuple[str, Any]:
        """Returns the address of the server that answered the request `body`, and its answer; `about` describes the
        request.

        Raises:
            RewardError: no server answered in time, or one refused.
        """
        last = "none has answered yet"
        most = ATTEMPTS + len(self._servers) - 1
        tried: list[_Server] = []
        asked: _Server | None = None
        try:
            async with asyncio.timeout(self._timeout):
                async for attempt in attempts(most, wait=BACKOFF):
                    with attempt:
                        tried.append(await self._next_server(tried))
                        asked = tried[-1]
                        try:
                            return asked.url, await self._post(asked, body)
                        except PassingError as failure:
                            last, asked = str(failure), None
                            self._failures.tell(
                                f"a {self._name} failed; the others, or it again, are asked", reason=last
                            )
                            raise
        except TimeoutError:
            if asked is not None:  # a server that hangs counts as broken, but not one whose question was given up
                asked.circuit = asked.circuit.failed(time.monotonic())
            raise RewardError(
                f"No {self._name} judged {about} within {self._timeout:g} s (last: {last}): check the servers, or "
                "raise --reward.timeout."
            ) from None
        except PassingError:
            pass
        raise RewardError(f"The {self._name}s failed {most} times (last: {last}): check the servers.")

    async def aclose(self) -> None:
        """Closes the connections; call it in the event loop that asked."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _next_server(self, tried: Sequence[_Server]) -> _Server:
        """Waits for a server whose circuit lets a call through; returns the least busy one, preferably not among
        `tried`."""
        while True:
            now = time.monotonic()
            ready = [server for server in self._servers if server.circuit.allows(now)]
            if ready:
                chosen = min(ready, key=lambda server: (server in tried, server.in_flight))
                chosen.circuit = chosen.circuit.started(now)
                return chosen
            await asyncio.sleep(BACKOFF / 2)

    async def _post(self, server: _Server, body: Mapping[str, Any]) -> Any:
        """Makes one attempt.

        Raises:
            PassingError: another attempt may succeed.
            RewardError: it cannot.
        """
        import httpx2

        server.in_flight += 1
        try:
            with foreign_code(self._refusal(server, "cannot be asked")):
                response = await self._http().post(server.url, json=body)
        except RewardError as error:
            server.circuit = server.circuit.failed(time.monotonic())
            if isinstance(error.__cause__, httpx2.HTTPError):
                raise PassingError(f"{server.url}: {error_text(error.__cause__)}") from error
            raise
        finally:
            server.in_flight -= 1
        if response.status_code == 429 or response.status_code >= 500:
            server.circuit = server.circuit.failed(time.monotonic())
            raise PassingError(f"{server.url} answered {response.status_code}")
        server.circuit = server.circuit.succeeded()
        if response.status_code != 200:
            raise RewardError(
                f"The {self._name} {server.url} answered {response.status_code} ({response.text[:QUOTED]!r}): check "
                f"--{self._flag} and what the server expects."
            )
        with foreign_code(self._refusal(server, f"answered {response.text[:QUOTED]!r}, which is no JSON")):
            return response.json()

    def _refusal(self, server: _Server, what: str) -> Callable[[str], RewardError]:
        return lambda words: RewardError(
            f"The {self._name} {server.url} {what} ({words}): check --{self._flag} and the server."
        )

    def _http(self) -> "httpx2.AsyncClient":
        import httpx2

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to the loop that opened them
            self._loop = loop
            token = os.environ.get(self._token_variable)
            # asyncio.timeout in ask is the deadline; a timeout of the client could only end the call earlier.
            self._client = httpx2.AsyncClient(
                timeout=None, headers={"Authorization": f"Bearer {token}"} if token else None
            )
        return self._client
