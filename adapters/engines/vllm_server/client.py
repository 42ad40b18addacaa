"""Calls to a model server: JSON over HTTP, with a token, a deadline, and errors of one sentence."""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.adapters.system.retries import PassingError, attempts
from rollgrad.adapters.system.server_sent_events import ServerSentEvents
from rollgrad.application.foreign import foreign_code
from rollgrad.application.interruption import heed_stop
from rollgrad.application.rare_warning import RareWarning
from rollgrad.domain.errors import EngineError

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

TOKEN_VARIABLE = "ROLLGRAD_ENGINE_TOKEN"
"""Environment variable whose value, if set, is sent as a bearer token."""

CONNECT_SECONDS = 10.0
"""Longest time of a server to accept a connection."""

CALL_SECONDS = 300.0
"""Longest time of a server for a call that samples no reply. Repacking a large model takes seconds."""

ATTEMPTS = 3
"""Number of attempts of a call that may be repeated, where there is no patience for more."""

BACKOFF = 0.2
"""Seconds before the second attempt, and their random part; each further one waits twice as long."""

PASSING = frozenset({429, 502, 503, 504})
"""Statuses of servers and proxies that may be temporary."""

EVENT_STREAM, END_OF_EVENTS = "text/event-stream", "[DONE]"
"""Media type of an answer in events, and the data of the last one."""

PLACE_BYTES = 512
"""Bytes of one log-prob in an answer, at most: with the token's id, its text and bytes, and its rank."""

QUOTED = 300
"""Characters of an answer that an error quotes."""


class ServerClient:
    """Calls one server. Its connections belong to the event loop that calls; each carries one call, for a server may
    close one that has carried another just when it is used again, and not every call may be repeated.

    Args:
        url: http or https; a `/v1` at its end is left out.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        """Address before all paths, without a slash at its end."""
        self._failures = RareWarning()
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = CALL_SECONDS,
        repeat: bool = False,
        places: int = 0,
        patience: float = 0.0,
    ) -> tuple[int, Any]:
        """Makes a GET, or with a body a POST; returns status, and JSON or text. Query parameters are part of the path.

        `seconds` None waits for as long as the connection stands. `repeat`: the call may be made twice, and is made
        again where it fails in passing, for `patience` seconds or `ATTEMPTS` times, whichever is more. `places`: how
        many log-probs are asked for, for which an answer may have `PLACE_BYTES` each besides the usual bound.

        Raises:
            EngineError: there was no answer, or one larger than it may be.
            BrokenOffError: the run ends, of whose update the call is a part.
        """
        return await self._attempts(repeat, lambda last: self._once(path, body, seconds, places, last=last), patience)

    async def stream(
        self, path: str, body: Mapping[str, Any], listen: Callable[[], Callable[[Any], None]], *, places: int = 0
    ) -> None:
        """Makes a POST, and tells the JSON of each event of the answer as it comes; an answer in one piece is one
        event, for whose `places` see `ask`. The call is made again, with another listener, where it fails in passing.

        Raises:
            EngineError: there was no answer, it broke off, it is an error, or larger than it may be.
        """

        async def attempt(last: bool) -> None:
            hear = listen()
            async with aclosing(self._events(path, body, places, last=last)) as events:
                async for event in events:
                    hear(event)

        await self._attempts(True, attempt)

    async def _attempts(self, repeat: bool, attempt: Callable[[bool], Awaitable[T]], patience: float = 0.0) -> T:
        """Returns what one of the attempts returns; each is told whether it is the last."""
        until = time.monotonic() + patience
        async for again in attempts(None, wait=BACKOFF):
            with again:
                heed_stop()
                last = not repeat or (again.num >= ATTEMPTS and time.monotonic() >= until)
                try:
                    return await attempt(last)
                except PassingError as failure:
                    if _too_large(failure):
                        raise EngineError(f"The server {self.url} was not heard to its end. {failure}") from failure
                    self._failures.tell("a call of a model server failed", url=self.url, reason=str(failure))
                    if last:
                        raise EngineError(
                            f"The server {self.url} does not answer: {failure}. Check that it runs, and its address."
                        ) from failure.__cause__
                    raise
        raise AssertionError("an attempt returns or raises")

    async def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = CALL_SECONDS,
        repeat: bool = False,
        places: int = 0,
        patience: float = 0.0,
    ) -> Any:
        """Returns the JSON that `ask` gets with status 200.

        Raises:
            EngineError: there was no answer, or another status.
        """
        status, answer = await self.ask(path, body, seconds=seconds, repeat=repeat, places=places, patience=patience)
        if status != 200:
            raise EngineError(self.refusal(path, status, answer))
        return answer

    def refusal(self, path: str, status: int | str, answer: Any) -> str:
        """Returns one sentence about an answer other than 200."""
        if status in (401, 403):
            return (
                f"The server {self.url} refuses its callers ({status}): set the environment variable {TOKEN_VARIABLE} "
                "to the token that it asks for (vLLM's --api-key)."
            )
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        said = error.get("message", error) if isinstance(error, dict) else error
        return f"The server {self.url} answered {path.partition('?')[0]} with {status}: {str(said)[:QUOTED]}"

    async def aclose(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _once(
        self, path: str, body: Mapping[str, Any] | None, seconds: float | None, places: int, *, last: bool
    ) -> tuple[int, Any]:
        from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES, bound_to

        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(seconds):
                with foreign_code(PassingError):  # whatever it is, another attempt may go well
                    async with self._http().stream(method, self.url + path, json=body) as response:
                        bound_to(response, ANSWER_BYTES + PLACE_BYTES * places)
                        await response.aread()
        except TimeoutError:
            raise EngineError(
                f"The server {self.url} took more than {seconds:g} s for {method} {path.partition('?')[0]}."
            ) from None
        return _read(response, last)

    async def _events(self, path: str, body: Mapping[str, Any], places: int, *, last: bool) -> AsyncGenerator[Any]:
        from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES, bound_to

        # No deadline: a frozen reply takes as long as the pause. Who waits looks after the server.
        whole = None
        with foreign_code(PassingError):
            async with self._http().stream("POST", self.url + path, json=body) as response:
                if response.headers.get("content-type", "").startswith(EVENT_STREAM) and response.is_success:
                    events = ServerSentEvents()
                    async for part in response.aiter_bytes():
                        for data in events.feed(part):
                            if data == END_OF_EVENTS:
                                return
                            yield self._checked(path, 200, json.loads(data))
                    raise ConnectionError("the answer broke off")
                bound_to(response, ANSWER_BYTES + PLACE_BYTES * places)
                await response.aread()
                whole = response
        yield self._checked(path, *_read(whole, last))

    def _checked(self, path: str, status: int, answer: Any) -> Any:
        failed = isinstance(answer, dict) and bool(answer.get("error"))  # told after the status
        if status != 200 or failed:
            raise EngineError(self.refusal(path, "an error" if status == 200 else status, answer))
        return answer

    def _http(self) -> "httpx2.AsyncClient":
        import httpx2

        from rollgrad.adapters.system.bounded_answer import UNCOMPRESSED

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            token = os.environ.get(TOKEN_VARIABLE)
            self._client = httpx2.AsyncClient(
                verify=trusted_certificates(),
                timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                headers={**UNCOMPRESSED, **({"Authorization": f"Bearer {token}"} if token else {})},
            )
        return self._client


def _too_large(error: Exception) -> bool:
    """Returns whether an answer was given up because it has more bytes than it may, which another would have, too."""
    import httpx2

    return isinstance(error.__cause__, httpx2.StreamError)


def _read(response: "httpx2.Response", last: bool) -> tuple[int, Any]:
    """Returns the status of an answer, and its JSON or text."""
    if response.status_code in PASSING and not last:
        raise PassingError(f"it is busy or ending ({response.status_code})")
    try:
        return response.status_code, response.json()
    except (ValueError, RecursionError):  # no JSON, or so deep that nobody reads it
        return response.status_code, response.text
