"""Answers over HTTP that take no more memory than they may. Imports httpx2.

Does not own: events of a stream, each of which its reader bounds.
"""

import time
from collections.abc import AsyncIterator, Iterator
from typing import cast

import httpx2

ANSWER_BYTES = 16 * 2**20
"""Largest answer, and largest event of a stream: a dozen large images, or the rewards of a hundred thousand replies."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of a request whose answer is to be bounded: a compressed one may grow a thousandfold."""


def bound_to(response: httpx2.Response, most: int | None) -> None:
    """Has the reading of an answer, whose body is not read yet, raise `httpx2.StreamError` after `most` bytes (None for
    no bound), and at once if it is compressed."""
    stream = cast(httpx2.AsyncByteStream, response.stream)
    encoding = response.headers.pop("content-encoding", "identity")
    if encoding != "identity":
        response.stream = _Bounded(stream, 0, f"it is compressed ({encoding}), which was not asked for")
    elif most is not None:
        response.stream = _Bounded(stream, most, f"it has more than {most:,} bytes")


def parts_within(response: httpx2.Response, most: int, seconds: float | None = None) -> Iterator[bytes]:
    """Yields the parts of an answer whose body is not read yet, of a client without an event loop; raises
    `httpx2.StreamError` as `bound_to` says, and where the answer is not whole after `seconds` (None: it may take as
    long as it likes), however steadily its parts come."""
    encoding, read, began = response.headers.get("content-encoding", "identity"), 0, time.monotonic()
    if encoding != "identity":
        raise httpx2.StreamError(f"The answer cannot be used: it is compressed ({encoding}), which was not asked for.")
    for part in response.iter_bytes():
        read += len(part)
        if read > most:
            raise httpx2.StreamError(f"The answer cannot be used: it has more than {most:,} bytes.")
        if seconds is not None and time.monotonic() - began > seconds:
            raise httpx2.StreamError(f"The answer cannot be used: it was not whole after {seconds:g} s.")
        yield part


async def bound(response: httpx2.Response) -> None:
    """Bounds an answer, whatever it says that it is, to `ANSWER_BYTES`. A hook of clients, which see an answer before
    its body is read."""
    bound_to(response, ANSWER_BYTES)


async def bound_but_events(response: httpx2.Response) -> None:
    """Bounds an answer as `bound` does, unless it is a stream of events, each of which the client bounds."""
    events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    bound_to(response, None if events else ANSWER_BYTES)


class _Bounded(httpx2.AsyncByteStream):
    """A stream that raises, saying why, where it has more than `most` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int, why: str) -> None:
        self._stream, self._most, self._why = stream, most, why

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for part in self._stream:
            read += len(part)
            if read > self._most:
                raise httpx2.StreamError(f"The answer cannot be used: {self._why}.")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
