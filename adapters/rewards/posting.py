"""Requests to judging servers, in JSON, over several addresses, with retries until one deadline.

A request goes to the server with the fewest requests in flight whose circuit is closed. Judging twice is harmless, so a
request is sent again, preferably to another server, when a connection breaks, a server answers 429 or 5xx, or half of
the time has passed. Does not own: the content of requests and answers.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.adapters.system.retries import PassingError, attempts
from rollgrad.application.foreign import error_text, foreign_code
from rollgrad.application.rare_warning import RareWarning
from rollgrad.domain.addresses import address_problem
from rollgrad.domain.control.circuit_breaker import Circuit
from rollgrad.domain.errors import ConfigurationError, RewardError

if TYPE_CHECKING:
    import httpx2

BACKOFF = 0.2
"""Seconds before the second attempt, and their random part; each further one doubles them."""
REFUSED = (401, 403)
"""Statuses of an answer to those who have not the right token."""
QUOTED = 200
"""Largest number of characters of an answer in an error."""


@define(eq=False)
class _Server:
    url: str
    circuit: Circuit = field(factory=Circuit)
    in_flight: int = 0


@define(eq=False)
class _Question:
    """A request, with the servers that it was sent to, those of them that have not answered, and the last failure."""

    body: Mapping[str, Any]
    tried: list[_Server] = field(factory=list)
    asked: list[_Server] = field(factory=list)
    last: str = "none has answered yet"

    def blame(self, servers: Sequence[_Server]) -> None:
        """Counts those of `servers` that have not answered as broken: they hang."""
        for server in {*servers} & {*self.asked}:
            server.circuit = server.circuit.failed(time.monotonic())


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
        request. A server that takes more than half of the time may hang: another is asked beside it, and whoever
        answers first is believed.

        Raises:
            RewardError: no server answered in time, or one refused.
        """
        question = _Question(body)
        try:
            async with asyncio.timeout(self._timeout):
                return await (self._in_turn(question) if len(self._servers) == 1 else self._of_two(question))
        except TimeoutError:
            question.blame(question.asked)
            raise RewardError(
                f"No {self._name} judged {about} within {self._timeout:g} s (last: {question.last}): check the "
                "servers, or raise --reward.timeout."
            ) from None

    async def _of_two(self, question: "_Question") -> tuple[str, Any]:
        """Runs `_in_turn`, after half of the time twice at once; returns the first answer."""
        tasks = [asyncio.create_task(self._in_turn(question))]
        try:
            await asyncio.wait(tasks, timeout=self._timeout / 2)
            slow = [*question.asked]
            if slow:
                tasks.append(asyncio.create_task(self._in_turn(question)))
            found = await next(asyncio.as_completed(tasks))
            question.blame(slow)
            return found
        finally:
            for task in tasks:
                task.cancel()

    async def _in_turn(self, question: "_Question") -> tuple[str, Any]:
        """Asks one server after the other until one answers.

        Raises:
            RewardError: a server refused.
        """
        async for attempt in attempts(None, wait=BACKOFF):
            with attempt:
                server = await self._next_server(question.tried)
                question.tried.append(server)
                question.asked.append(server)
                try:
                    answer = await self._post(server, question.body)
                except PassingError as failure:
                    question.last = str(failure)
                    self._failures.tell(
                        f"a {self._name} failed; the others, or it again, are asked", reason=question.last
                    )
                    question.asked.remove(server)
                    raise
                question.asked.remove(server)
                return server.url, answer
        raise AssertionError

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
        if response.has_redirect_location:  # another host would get the token
            raise RewardError(
                f"The {self._name} {server.url} sends its callers to {response.headers['location'][:QUOTED]!r} "
                f"({response.status_code}): if that is right, set --{self._flag} to the whole address."
            )
        if response.status_code in REFUSED:
            raise RewardError(
                f"The {self._name} {server.url} refuses its callers ({response.status_code}, "
                f"{response.text[:QUOTED]!r}): set the environment variable {self._token_variable} to the token that "
                "it asks for."
            )
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

        from rollgrad.adapters.system.bounded_answer import UNCOMPRESSED, bound

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to the loop that opened them
            self._loop = loop
            token = os.environ.get(self._token_variable)
            # asyncio.timeout in ask is the deadline; a timeout of the client could only end the call earlier.
            self._client = httpx2.AsyncClient(
                verify=trusted_certificates(),
                timeout=None,
                headers={**UNCOMPRESSED, **({"Authorization": f"Bearer {token}"} if token else {})},
                event_hooks={"response": [bound]},
            )
        return self._client
