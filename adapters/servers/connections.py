"""Connections of rollgrad's HTTP servers, bounded even before a token is checked.

Invariants: a connection is closed if its client sends a header or body too slowly, takes nothing of an answer for long,
or if there are too many of them; memory for an unfinished header is bounded. Does not own: the content of requests
(`guard`).
"""

import asyncio
import resource
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 32 * 2**10
"""Largest size of request line and headers together: twice h11's default, for long keys. It bounds their number,
too."""
HEADER_SECONDS = 20.0
"""Longest time from the connection, or a header's first byte, to the header's end."""
IDLE_SECONDS = 75
"""Seconds that a connection waits for the next request: more than proxies and clients keep theirs (nginx and balancers
60 s, httpx 5 s), for a request that meets the closing of its connection is lost."""
BODY_SECONDS = 120.0
"""Longest time from a header's end to the body's: 16 MB at a slow line's 140 KB/s."""
UNREAD_SECONDS = 120.0
"""Longest time in which a client may read nothing of an answer that waits for it. A client that vanished reads nothing
any more."""
DISCARD_SECONDS = 0.1
"""Seconds between two reads of a refused body, which makes 2.5 MB a second."""
MOST_CONNECTIONS = 4096
"""Largest number of connections of a server, or half of the file descriptors of the process if that is less."""

WAITING_CONNECTIONS = 2048
"""Connections that wait in the kernel to be accepted; it may allow fewer."""


def connection_limit() -> int:
    """Returns the largest number of connections of a server; the process needs file descriptors for other things,
    too."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, allowed // 2))


def accepted_at_once() -> int:
    """Returns how many connections are accepted before those that are too many are closed, which takes a few turns of
    the event loop: so few that a burst leaves the process file descriptors for other things."""
    return max(1, min(64, connection_limit() // 16))


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines for what clients send, and no more than `connection_limit` of them."""

    deadline: asyncio.TimerHandle | None = None
    waits_for: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection, or closes it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > connection_limit():
            transport.abort()
            return
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            its_socket = transport.get_extra_info("socket")
            its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Reads data; the deadline is that of the whole header or body, which single bytes do not extend."""
        super().data_received(data)
        self._watch()
        if self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            # A refused client still sends: closing would often lose the refusal, reading at full speed costs much.
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
        state: Any = self.conn.their_state
        if state is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]:
            state = None  # between two requests, where uvicorn closes the connection after IDLE_SECONDS
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
