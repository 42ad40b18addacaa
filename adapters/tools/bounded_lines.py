"""Lines that a process writes, none of which takes more memory than it may. Imports anyio, and so comes with MCP's
SDK."""

from anyio.streams.text import TextReceiveStream

from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES


class BoundedLines(TextReceiveStream):
    """A stream of text that ends at a line of more than `ANSWER_BYTES` characters: the SDK, which reads by it, keeps
    each line until it is whole."""

    _line = 0

    async def receive(self) -> str:
        """Returns the next piece.

        Raises:
            ConnectionError: a line is too long; the stream is closed, or the SDK would read on to no end.
        """
        text = await super().receive()
        _, _, last = text.rpartition("\n")
        self._line = len(last) + (0 if len(last) < len(text) else self._line)
        if self._line > ANSWER_BYTES:
            await self.aclose()
            raise ConnectionError(f"a message has more than {ANSWER_BYTES:,} characters")
        return text
