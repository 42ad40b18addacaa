"""Lines of server-sent events, as they come from a connection.

A line ends with a line feed, perhaps after a carriage return. HTTP clients end lines at other characters of Unicode,
too (U+2028, U+0085), which JSON may hold as they are: an event with one of them would be cut in two.
"""


class EventLines:
    """Divides bytes of UTF-8 into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[str]:
        """Returns the lines that the next bytes complete, without their ends.

        >>> lines = EventLines()
        >>> lines.feed(b"data: 1" + bytes([13, 10]) + b"da"), lines.feed(b"ta: 2" + bytes([10]))
        (['data: 1'], ['data: 2'])
        """
        *whole, self._rest = (self._rest + part).split(b"\n")
        return [line.removesuffix(b"\r").decode() for line in whole]
