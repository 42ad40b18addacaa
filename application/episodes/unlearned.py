"""Replies of the policy in an agent's episode that nothing is learned from: it plays an opponent, a user or a judge.

Does not own: what is learned from (`RecordedSession`).
"""

import itertools
import secrets
from collections.abc import Awaitable, Callable

from attrs import evolve

from rollgrad.application.episodes.chat_request import ChatRequest, RefusedError
from rollgrad.application.episodes.reply import ChatReply, OnPiece
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import ForeignError

SEED_STRIDE = 2**24
"""Distance between the seeds of such replies, which are those of no turn of the episode."""


class UnlearnedReplies:
    """Those of one episode, which `key` gives access to.

    Args:
        reply: answers a request and records nothing (`ChatService.reply`).
        params: the trainer's sampling settings, of which a client may set others here.
        most: largest number of replies.
        max_tokens: tokens of one conversation at most; None for the model's positions.
    """

    def __init__(
        self, reply: Callable[..., Awaitable[ChatReply]], params: SamplingParams, most: int, max_tokens: int | None
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        self._reply = reply
        self._params = params
        self._most = most
        self._max_tokens = max_tokens
        self._closed = False
        self._numbers: set[int] = set()

    @property
    def count(self) -> int:
        """Number of replies that were given, or are being sampled."""
        return len(self._numbers)

    async def reply(self, request: ChatRequest, on_piece: OnPiece | None = None) -> ChatReply:
        """Answers a request. A reply that fails, or whose client leaves before its end, counts as none, so that a retry
        is the same reply.

        Raises:
            RefusedError: the episode has ended, has had all of these replies, or the conversation has no room for one.
        """
        if self._closed:
            raise RefusedError("The session is closed: its episode has ended.")
        number = next(number for number in itertools.count(1) if number not in self._numbers)
        if number > self._most:
            raise RefusedError(
                f"The session has had its {self._most} unlearned replies (rollout.max_turns).", "turn_limit"
            )
        self._numbers.add(number)
        params = evolve(self._params, seed=(self._params.seed + SEED_STRIDE * number) % 2**63)
        try:
            with foreign_code(ForeignError):  # a template, a tokenizer or an engine's library may raise anything
                return await self._reply(request, params, on_piece=on_piece, max_tokens=self._max_tokens)
        except BaseException:  # also a cancellation
            self._numbers.discard(number)
            raise

    def close(self) -> None:
        """Ends access to them."""
        self._closed = True
