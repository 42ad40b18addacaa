"""Connections of rollgrad's HTTP servers, bounded before anybody is asked for a token.

Invariants: a client that sends its header or its body too slowly is hung up on, as is one of more connections than the
process has room for; what is kept of an unfinished header is bounded. Does not own: what a request may say (`guard`).
"""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 32 * 2**10
"""Request line and headers together at most: twice h11's own default, for long keys; their number is bounded by it."""
HEADER_SECONDS = 20.0
"""From a header's first byte, or the connection, to the header's end."""
BODY_SECONDS = 120.0
"""From a header's end to the body's: 16 MB at a slow line's 140 KB/s."""
DISCARD_SECONDS = 0.1
"""Between two reads of a body that has been refused: 2.5 MB a second."""
MOST_CONNECTIONS = 4096
"""Of one server at most; half of the descriptors that the process may open if that is less."""


def connection_limit() -> int:
    """Returns how many connections a server takes at once: the process needs descriptors for other things too."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, allowed // 2))


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines for what clients send, and no more than `connection_limit` of them."""

    deadline: asyncio.TimerHandle | None = None
    waits_for: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or closes it where there are enough."""
        super().connection_made(transport)
        if len(self.connections) > connection_limit():
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Reads on; the deadline is of the whole header or body, so that a byte now and then does not move it."""
        super().data_received(data)
        self._watch()
        if self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            # Refused, but still sending: hanging up would often lose the refusal, reading at full speed costs much.
            self.flow.pause_reading()
            self.loop.call_later(DISCARD_SECONDS, self.flow.resume_reading)

    def on_response_complete(self) -> None:
        """Waits for the next request of the connection; uvicorn closes an idle one."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the deadline with the connection."""
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        state = self.conn.their_state
        if state is self.waits_for and self.deadline is not None:
            return
        self._unwatch()
        self.waits_for = state
        seconds = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
        if seconds is not None:
            self.deadline = self.loop.call_later(seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
