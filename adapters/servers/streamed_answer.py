"""The answer to a call that streams: events of its wire, to their end, to an error, or until the client leaves.

Invariant: an answer that has begun ends with the wire's own last event or the wire's own error, also where the server
stops in its midst. Does not own: how replies are sampled, and errors before the first event (`agent_server`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollgrad.adapters.servers.guard import HttpError, internal_error, stopping
from rollgrad.adapters.servers.operation import OUTCOME
from rollgrad.adapters.servers.wire import Decode, EventStream
from rollgrad.application.episodes.chat_request import RefusedError
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError

KEEP_ALIVE_SECONDS = 3.0
"""Seconds of silence after which a stream sends a keep-alive: clients give up on silent streams, and retry."""
LAST_WORD_SECONDS = 1.0
"""Longest that the error of a server that stops may take to be sent to a client that reads slowly."""
STATUS: Mapping[str, int] = {
    "sealed": 410,
    "turn_limit": 400,
    "context_length": 400,
    "conflict": 400,
    "busy": 429,
    "unsupported": 400,
}
CODES: Mapping[str, str] = {"context_length": "context_length_exceeded"}

_log = structlog.get_logger()


class Pieces(asyncio.Queue[tuple[str, str, int] | None]):
    """Pieces of replies, in order: field, text and number of the reply; None is the end of all. `begun` is set with
    the first. `read` counts the tokens that the engine has been given for them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.read = 0

    def count_read(self, tokens: int) -> None:
        """Counts the tokens of a conversation."""
        self.read += tokens

    def put_nowait(self, item: tuple[str, str, int] | None) -> None:
        """Adds a piece."""
        super().put_nowait(item)
        self.begun.set()


class StreamedAnswer(Response):
    """Sends `events` of `pieces` and of the replies, which are given up if the client leaves or the server stops."""

    media_type = "text/event-stream"

    def __init__(
        self, events: EventStream, replies: "asyncio.Future[Sequence[ChatReply]]", pieces: Pieces, decode: Decode
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers()
        self._events, self._replies, self._pieces, self._decode = events, replies, pieces, decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implements ASGI."""

        async def tell(event: str) -> None:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        left = asyncio.ensure_future(client_left(receive))
        left.add_done_callback(lambda _: self._replies.cancel())
        error: HttpError | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self._told():
                    await tell(event)
            except Exception as failure:
                if left.done():
                    return
                if not isinstance(failure, HttpError):  # a defect: it is logged, and not shown to the client
                    _log.exception("stream_failed")
                error = failure if isinstance(failure, HttpError) else internal_error()
                for event in self._events.failed(error):
                    await tell(event)
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:  # the server ends, and has waited for the answer as long as it may
            error = stopping()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    for event in self._events.failed(error):
                        await tell(event)
                    await send({"type": "http.response.body", "body": b""})
            raise
        finally:
            if error is not None:
                scope[OUTCOME] = error.status_code
            left.cancel()
            self._replies.cancel()

    async def _told(self) -> AsyncIterator[str]:
        """Yields the events.

        Raises:
            HttpError: the replies failed.
        """
        events, heard = self._events, set()
        for event in events.start(self._pieces.read):
            yield event
        while True:
            try:
                piece = await asyncio.wait_for(self._pieces.get(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield events.keep_alive()
                continue
            if piece is None:
                break
            heard.add(piece[2])
            for event in events.piece(*piece):
                yield event
        with refusals():
            replies = self._replies.result()
        for choice, reply in enumerate(replies):
            if choice in heard:
                continue  # only a retry gets the whole reply, which an earlier request got in pieces
            for field in ("reasoning_content", "content"):
                if reply.parsed.message.get(field):
                    for event in events.piece(field, reply.parsed.message[field], choice):
                        yield event
        for event in await asyncio.to_thread(lambda: [*events.finish(replies, self._decode)]):
            yield event


async def client_left(receive: Receive) -> None:
    """Waits until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of a call into errors for the client."""
    try:
        yield
    except RefusedError as error:
        headers = {"Retry-After": "1"} if error.kind == "busy" else None
        code = CODES.get(error.kind, error.kind)
        raise HttpError(STATUS[error.kind], str(error), code=code, headers=headers) from error
    except asyncio.CancelledError as error:
        raise HttpError(410, "The session was closed while the reply was sampled.", code="sealed") from error
    except ConfigurationError as error:  # the engine: the conversation is too long for the model
        raise HttpError(400, str(error), code="context_length_exceeded") from error
    except DataError as error:
        raise HttpError(400, str(error), code="invalid_messages") from error
    except EngineError as error:  # the client is told, and so is who keeps the server
        _log.warning("engine_failed", reason=str(error))
        raise HttpError(503, str(error), code="engine_error") from error
    except Exception as error:  # a defect: it is logged, and not shown to the client
        _log.exception("reply_failed")
        raise internal_error() from error
