"""Server-sent events, as they come from a connection.

A line ends with a line feed, perhaps after a carriage return. HTTP clients end lines at other characters of Unicode,
too (U+2028, U+0085), which JSON may hold as they are: an event with one of them would be cut in two.
"""

EVENT_BYTES = 16 * 2**20
"""Largest event: a reply of a hundred thousand tokens with their log-probs in one piece."""


class ServerSentEvents:
    """Reads the data of events, each of which has one line of them, from bytes of UTF-8."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[str]:
        """Returns the data that the next bytes complete. Comments, which keep a connection alive, are left out.

        Raises:
            ValueError: an event has more than `EVENT_BYTES`.

        >>> events = ServerSentEvents()
        >>> events.feed(b": wait" + bytes([10]) + b"data: 1" + bytes([13, 10]) + b"da")
        ['1']
        >>> events.feed(b"ta:2" + bytes([10]))
        ['2']
        """
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > EVENT_BYTES:
            raise ValueError(f"an event has more than {EVENT_BYTES:,} bytes")
        return [line.removeprefix(b"data:").strip().decode() for line in lines if line.startswith(b"data:")]
