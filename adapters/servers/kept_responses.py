"""Conversations of OpenAI's responses that a server keeps, so that a request continues one by its id alone.

They are in memory, and forgotten when the server ends. Invariant: what is kept is bounded, by number, characters and
age; the oldest goes first. An id is a secret of whoever was answered: nothing lists them.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.wire import Call, Wire, bad
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.messages import Message, texts

PREVIOUS = "previous_response_id"
"""Field of OpenAI's responses that names the response which a request continues."""
NOT_FOUND = "previous_response_not_found"
"""OpenAI's code of the error for an unknown one, by which clients know to send the whole conversation."""
KEPT_RESPONSES, KEPT_CHARACTERS, KEPT_SECONDS = 4096, 64 * 10**6, 3600.0
"""Largest number of responses that a server keeps, of their characters together, and of seconds for each: many talks
at once, in little of a server's memory, for longer than a person takes to answer."""


@frozen(kw_only=True, eq=False)
class _Kept:
    said: Sequence[Message]
    turn: int | None
    answer: Mapping[str, Any]
    characters: int
    since: float


class KeptResponses:
    """Responses of one server, or of one episode, which keeps all, as it ends soon.

    Args:
        most, characters, seconds: bounds of number, text and age; by default there are none.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        most: float = float("inf"),
        characters: float = float("inf"),
        seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._characters, self._seconds, self._clock = most, characters, seconds, clock
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._size = 0

    def call(self, wire: Wire, body: Mapping[str, Any]) -> Call:
        """Returns the decoded body, with the conversation of the response that it continues before its own.

        Raises:
            HttpError: there is no such response, or the wire refuses the body.
        """
        name = body.get(PREVIOUS)
        if name is None or PREVIOUS not in wire.fields:
            return wire.decode(body)
        self._forget_old()
        if not isinstance(name, str) or name not in self._kept:
            raise bad(
                f"{PREVIOUS} is {json.dumps(name)[:60]}, but no such response is kept here: it was deleted, not to be "
                "stored, is too old, or the server has started again since. Send the whole conversation as input.",
                NOT_FOUND,
                param=PREVIOUS,
            )
        before = self._kept[name].said
        call = wire.decode({**body, PREVIOUS: None})
        said = call.request.messages
        first = _instructed(body)  # instructions of an earlier response do not last
        names = {one["id"]: one["function"]["name"] for m in before for one in m.get("tool_calls") or ()}
        new = [
            {**m, "name": m["name"] or names.get(m["tool_call_id"], "")} if m["role"] == "tool" else m
            for m in said[first:]
        ]
        return evolve(
            call,
            body=body,
            request=evolve(call.request, messages=[*said[:first], *before, *new], follows=self._kept[name].turn),
        )

    def keep(self, call: Call, reply: ChatReply, make_answer: Callable[[], Mapping[str, Any]]) -> None:
        """Keeps a response and the conversation up to it, unless its client said `store: false`."""
        if call.body.get("store") is False:
            return
        answer = make_answer()
        said = (*call.request.messages[_instructed(call.body) :], reply.parsed.message)
        size = sum(map(len, texts([*said, answer])))
        self._kept[answer["id"]] = _Kept(
            said=said, turn=reply.turn, answer=answer, characters=size, since=self._clock()
        )
        self._size += size
        self._forget_old()

    def answer(self, name: str) -> Mapping[str, Any]:
        """Returns a response.

        Raises:
            HttpError: 404; it is not kept.
        """
        self._forget_old()
        if name not in self._kept:
            raise HttpError(404, f"No response with the id {name[:60]!r} is kept here.", code="response_not_found")
        return self._kept[name].answer

    def read(self, name: str) -> Sequence[Message]:
        """Returns the conversation that a response answers, with that of those which it continues, without
        instructions.

        Raises:
            HttpError: 404; it is not kept.
        """
        self.answer(name)
        return self._kept[name].said[:-1]

    def drop(self, name: str) -> None:
        """Forgets a response.

        Raises:
            HttpError: 404; it is not kept.
        """
        self.answer(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._size -= self._kept.pop(name).characters

    def _forget_old(self) -> None:
        since = self._clock() - self._seconds
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.since >= since and len(self._kept) <= self._most and self._size <= self._characters:
                return
            self._forget(name)


def _instructed(body: Mapping[str, Any]) -> int:
    """Returns how many messages of the conversation are the request's `instructions`."""
    return 1 if body.get("instructions") else 0
