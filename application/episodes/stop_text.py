"""Stop texts, which end a reply: the engine stops after them, and the client gets the text before them."""

from collections.abc import Sequence

from attrs import evolve

from rollgrad.application.episodes.reply import ChatReply, OnPiece


class StopText:
    """Cuts one reply's `content` at the first of `stops`, also while it comes in pieces."""

    def __init__(self, stops: Sequence[str], on_piece: OnPiece | None = None) -> None:
        self._stops = tuple(stops)
        self._on_piece = on_piece
        self._held = ""
        self._ended = False
        self._longest = max(map(len, self._stops))

    def hear(self, field: str, text: str) -> None:
        """Passes on text that cannot be part of a stop text."""
        assert self._on_piece is not None
        if field != "content":
            self._on_piece(field, text)
            return
        if self._ended:
            return
        self._held += text
        place, stop = self._first_stop(self._held)
        self._ended = stop is not None
        if stop is None:  # the text may end with the beginning of a stop text
            latest = range(max(0, len(self._held) - self._longest + 1), len(self._held))
            place = next((i for i in latest if any(s.startswith(self._held[i:]) for s in self._stops)), place)
        if self._held[:place]:
            self._on_piece(field, self._held[:place])
        self._held = self._held[place:]

    def finish(self, reply: ChatReply) -> ChatReply:
        """Returns the reply cut at the stop text, after passing on the text held back."""
        content = str(reply.parsed.message.get("content") or "")
        place, stop = self._first_stop(content)
        if self._on_piece is not None and self._held and not self._ended:
            self._on_piece("content", self._held)
        if stop is None:
            return reply
        message = {**reply.parsed.message, "content": content[:place]}
        return evolve(reply, parsed=evolve(reply.parsed, message=message), stopped_by=stop)

    def _first_stop(self, text: str) -> tuple[int, str | None]:
        """Returns the index of the first stop text, and the stop text; the end of the text and None if there is
        none."""
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(found, key=lambda each: each[0], default=(len(text), None))
