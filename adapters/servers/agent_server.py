"""The agent server: the wires of OpenAI (chat completions, responses, completions) and Anthropic over one
`ChatService`.

`/s/KEY/v1/...` is a recorded session: an agent without any support for training is trained through its base URL. The
key may also be sent as API key. A request without a session is answered and forgotten if `answer` is given, else
refused. Invariants: a key opens one session and reveals nothing of others; a client that disconnects frees the engine,
unless its session records the reply, which a retry then gets.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from attrs import evolve, frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from rollgrad.adapters.chat.image_files import check_pixels
from rollgrad.adapters.chat.pictures import image_sources
from rollgrad.adapters.servers.anthropic_wire import AnthropicWire
from rollgrad.adapters.servers.completions_wire import CompletionsWire
from rollgrad.adapters.servers.guard import MAX_BODY_BYTES, TOO_LARGE, HttpError, given_keys, read_json
from rollgrad.adapters.servers.input_items import input_items, page_of
from rollgrad.adapters.servers.kept_responses import (
    KEPT_CHARACTERS,
    KEPT_RESPONSES,
    KEPT_SECONDS,
    PREVIOUS,
    KeptResponses,
)
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.operation import CLIENT_LEFT, Operation
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.adapters.servers.server import create_app, health_route
from rollgrad.adapters.servers.streamed_answer import (
    KEEP_ALIVE_SECONDS,
    Pieces,
    StreamedAnswer,
    client_left,
    refusals,
)
from rollgrad.adapters.servers.template_fields import TemplateFields
from rollgrad.adapters.servers.unread import UnreadFields
from rollgrad.adapters.servers.wire import Call, Wire, read
from rollgrad.application.episodes.chat_request import ChatRequest, Origin
from rollgrad.application.episodes.chat_service import ChatService, RecordedSession
from rollgrad.application.episodes.reply import ChatReply, OnPiece
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.messages import in_order_of_calls
from rollgrad.domain.errors import ForeignError
from rollgrad.domain.ports.agent_program import ROLE
from rollgrad.domain.ports.chat_codec import ChatCodec

BYTES_PER_TOKEN = 64
"""Largest number of bytes of JSON for a token of a conversation: text has 3 to 4, up to 24 if escaped to ASCII, and
runs of spaces more."""
SMALLEST_BODY = 256 * 2**10
"""Bytes that a request may have for any model, because it includes tools and settings."""

KEPT_TEXTS = 2**16
"""Largest number of tokens whose texts are kept: all of most vocabularies that are likely somewhere."""

UNKEPT = ("include", "top_logprobs", "return_token_ids")
"""Fields of a response whose answers (a line a token) are told once, and not kept."""

Answer = Callable[[ChatRequest, OnPiece | None], Awaitable[ChatReply]]
"""Function that answers a request outside of any session."""


def max_body_bytes(max_tokens: int | None) -> int:
    """Returns the largest size in bytes of a request to a model of `max_tokens` positions. A larger request leaves no
    room for a reply, and is refused before it is read."""
    return MAX_BODY_BYTES if max_tokens is None else min(MAX_BODY_BYTES, SMALLEST_BODY + BYTES_PER_TOKEN * max_tokens)


@frozen(kw_only=True, eq=False)
class _Asked:
    """A decoded request, where it came from, whether its session learns from the reply, and its ASGI scope."""

    call: Call
    session: RecordedSession | None
    unlearned: bool
    origin: Origin
    scope: Scope


class AgentServer:
    """Routes for `service`.

    Args:
        service: samples and keeps sessions.
        codec: counts and decodes tokens.
        model: the name that clients see.
        answer: answers requests outside of sessions; None refuses them.
        operation: observes the server; None for one that nobody operates, a training run's.
    """

    def __init__(
        self,
        service: ChatService,
        codec: ChatCodec,
        *,
        model: str,
        answer: Answer | None = None,
        operation: Operation | None = None,
    ) -> None:
        self._service = service
        self._unread = UnreadFields()
        self._template_fields = TemplateFields(codec, self._unread)
        self._model = model
        self._created = datetime.now(UTC).replace(microsecond=0)
        self._answer = answer
        self._operation = operation
        self._responses = KeptResponses(most=KEPT_RESPONSES, characters=KEPT_CHARACTERS, seconds=KEPT_SECONDS)
        self._of_sessions: WeakKeyDictionary[RecordedSession, KeptResponses] = WeakKeyDictionary()
        # A reply's log-probs name the same tokens again and again.
        self._texts = lru_cache(KEPT_TEXTS)(partial(codec.decode, special_tokens=True))

    def app(self) -> ASGIApp:
        """Returns the ASGI app; serve it behind a `Guard`."""
        openai, anthropic = OpenAIWire(), AnthropicWire()
        completions, responses = CompletionsWire(), ResponsesWire()

        def routes(prefix: str) -> list[Route]:
            return [
                self._route(f"{prefix}/v1/chat/completions", openai, self._complete),
                self._route(f"{prefix}/v1/completions", completions, self._complete),
                self._route(f"{prefix}/v1/responses", responses, self._complete),
                self._route(f"{prefix}/v1/messages", anthropic, self._complete),
                self._route(f"{prefix}/v1/messages/count_tokens", AnthropicWire(counts=True), self._count),
                Route(f"{prefix}/v1/models", self._models, methods=["GET"]),
                Route(f"{prefix}/v1/models/{{name}}", self._model_called, methods=["GET"]),
                Route(f"{prefix}/v1/responses/{{name}}", self._response_called, methods=["GET", "DELETE"]),
                Route(f"{prefix}/v1/responses/{{name}}/input_items", self._input_items, methods=["GET"]),
            ]

        both = [health_route(self._facts), *routes(""), *routes("/s/{key}")]
        if self._operation is None:
            return create_app(both)
        every = [*both, *self._operation.routes()]
        return self._operation.around(create_app(every), {route.path for route in every if isinstance(route, Route)})

    def _facts(self) -> Mapping[str, Any]:
        """Returns what `GET /health` says."""
        more = {} if self._operation is None else self._operation.facts()
        return {"model": self._model, "in_flight": self._service.in_flight, **more}

    def _route(self, path: str, wire: Wire, answer: Callable[[Wire, _Asked, Request], Awaitable[Response]]) -> Route:
        """Returns a POST route whose errors have the wire's form."""

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(wire, await self._read_call(wire, request), request)
            except HttpError as error:
                return JSONResponse(wire.error(error), error.status_code, headers=error.headers)

        return Route(path, endpoint, methods=["POST"])

    async def _complete(self, wire: Wire, asked: _Asked, request: Request) -> Response:
        if asked.call.stream:
            return await self._streaming(wire, asked, request)
        replies, call_id = await self._replies(asked, request), secrets.token_hex(12)
        self._keep(asked, wire, call_id, replies)
        # In a thread: many replies with log-probs take seconds to write, for which the event loop must not block.
        return await asyncio.to_thread(lambda: JSONResponse(wire.encode(asked.call, replies, call_id, self._decode)))

    async def _count(self, wire: Wire, asked: _Asked, request: Request) -> Response:
        chat = asked.call.request
        with refusals():
            tokens = await self._service.count_tokens(chat)
        return JSONResponse({"input_tokens": tokens})

    async def _models(self, request: Request) -> Response:
        self._session(request)
        page = {"first_id": self._model, "last_id": self._model, "has_more": False}
        return JSONResponse({"object": "list", "data": [self._described()], **page})

    async def _model_called(self, request: Request) -> Response:
        self._session(request)
        if request.path_params["name"] != self._model:
            raise HttpError(
                404, f"There is no such model here, only {self._model}.", code="model_not_found", param="model"
            )
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        """Returns what OpenAI's and Anthropic's servers say of a model."""
        created = self._created  # when it began to be served
        openai = {"object": "model", "created": int(created.timestamp()), "owned_by": "rollgrad"}
        anthropic = {"type": "model", "display_name": self._model, "created_at": f"{created:%Y-%m-%dT%H:%M:%SZ}"}
        return {"id": self._model, **openai, "max_model_len": self._service.max_tokens, **anthropic}

    async def _read_call(self, wire: Wire, request: Request) -> _Asked:
        session, keys = self._session(request), given_keys(request.headers)
        unlearned = session is not None and session.unlearned.key in keys
        try:
            body = await read_json(request)
        except HttpError as error:
            if error.code == TOO_LARGE and session is not None and not unlearned:
                with refusals():  # its conversation is longer than any that leaves room for a reply
                    session.refuse_length(error.detail)
            raise
        call = self._kept(session).call(wire, body)
        self._template_fields.check(wire, body)
        images = image_sources(call.request.messages)
        if images:  # in a thread: base64 and headers of thousands take a while
            with refusals():
                await asyncio.to_thread(check_pixels, images)
        self._unread.note(sorted(name for name in body.keys() - wire.fields if body[name] is not None))
        if call.request.form is None and any(map(_is_strict, read(body, "tools", list, []))):
            self._unread.note(["strict"])
        if session is not None and call.model not in ("", self._model):
            self._unread.note_model(call.model)
        role = "" if session is None else _role(session, keys)
        call = evolve(
            call,
            model=call.model or self._model,
            request=evolve(call.request, role=role, messages=in_order_of_calls(call.request.messages)),
        )
        origin = _origin(request, body, role)
        return _Asked(call=call, session=session, unlearned=unlearned, origin=origin, scope=request.scope)

    def _kept(self, session: RecordedSession | None) -> KeptResponses:
        """Returns the responses that a request may continue: those of its episode, or those outside of any."""
        return self._responses if session is None else self._of_sessions.setdefault(session, KeptResponses())

    def _keep(self, asked: _Asked, wire: Wire, call_id: str, replies: Sequence[ChatReply]) -> None:
        """Keeps what a later request may continue."""
        if PREVIOUS in wire.fields:
            body = {name: value for name, value in asked.call.body.items() if name not in UNKEPT}
            told = partial(wire.encode, evolve(asked.call, body=body), replies, call_id, self._decode)
            self._kept(asked.session).keep(asked.call, replies[0], told)

    async def _response_called(self, request: Request) -> Response:
        kept, name = self._kept(self._session(request)), request.path_params["name"]
        if request.method == "DELETE":
            kept.drop(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(kept.answer(name))

    async def _input_items(self, request: Request) -> Response:
        kept, name = self._kept(self._session(request)), request.path_params["name"]
        return JSONResponse(page_of(input_items(name, kept.read(name)), request.query_params))

    def _session(self, request: Request) -> RecordedSession | None:
        """Returns the session of a request, None outside of sessions."""
        key = request.path_params.get("key")
        if key is not None:
            session = self._service.session(key)
            if session is None:
                raise HttpError(410, "There is no such session, or its episode has ended.", code="sealed")
            return session
        keys = (key.partition(":")[0] for key in given_keys(request.headers))
        session = next(filter(None, map(self._service.session, keys)), None)
        if session is None and self._answer is None:
            raise HttpError(401, "Send the session's key as API key, or use its URL.", code="invalid_api_key")
        return session

    async def _replies(self, asked: _Asked, request: Request) -> Sequence[ChatReply]:
        task = asyncio.ensure_future(self._sampled(asked))
        gone = asyncio.ensure_future(client_left(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HttpError(CLIENT_LEFT, "The client went away.")
            with refusals():
                return task.result()
        finally:
            task.cancel()
            gone.cancel()

    async def _sampled(self, asked: _Asked, pieces: "Pieces | None" = None) -> Sequence[ChatReply]:
        """Samples all replies to a request at once; if one fails, the others are given up."""
        tasks = [
            asyncio.ensure_future(self._sample(asked, index, pieces))
            for index in range(len(asked.call.prompts) * asked.call.choices)
        ]
        try:
            replies = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if self._operation is not None:
            self._operation.count(replies, asked.call.choices, asked.scope)
            if pieces is not None:  # a reply of calls alone comes in one piece, at its end
                self._operation.count_first(asked.scope)
        return replies

    def _teller(self, asked: _Asked, pieces: "Pieces | None", choice: int) -> OnPiece | None:
        """Returns the function that puts the pieces of one reply into the queue."""
        if pieces is None:
            return None

        def tell(field: str, text: str) -> None:
            if self._operation is not None:
                self._operation.count_first(asked.scope)
            pieces.put_nowait((field, text, choice))

        return tell

    async def _sample(self, asked: _Asked, index: int, pieces: "Pieces | None") -> ChatReply:
        on_piece = self._teller(asked, pieces, index)
        prompt, choice = divmod(index, asked.call.choices)
        request = evolve(asked.call.request, prompt=asked.call.prompts[prompt], choice=choice)
        if pieces is not None:
            request = evolve(request, on_read=pieces.count_read)
        if asked.session is not None and asked.unlearned:
            return await asked.session.unlearned.reply(request, on_piece)
        if asked.session is not None:
            origin = evolve(asked.origin, key=f"{asked.origin.key}/{choice}")
            return await asked.session.reply(request, origin=origin, on_piece=on_piece)
        assert self._answer is not None
        with foreign_code(ForeignError):  # a template, a tokenizer or a tool may raise anything
            return await self._answer(request, on_piece)

    async def _streaming(self, wire: Wire, asked: _Asked, request: Request) -> Response:
        """Streams a reply. An error before the first piece is an HTTP status, as without streaming, to which clients
        react.
        """
        pieces = Pieces()
        task = asyncio.ensure_future(self._sampled(asked, pieces))
        task.add_done_callback(lambda task: pieces.put_nowait(None))
        waits = [asyncio.ensure_future(pieces.begun.wait()), asyncio.ensure_future(client_left(request.receive))]
        try:
            await asyncio.wait(waits, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                raise HttpError(CLIENT_LEFT, "The client went away.")
            if task.done():
                with refusals():
                    task.result()
        except BaseException:  # also when this request is cancelled
            task.cancel()
            raise
        finally:
            for wait in waits:
                wait.cancel()
        call_id = secrets.token_hex(12)

        def keep(done: "asyncio.Task[Sequence[ChatReply]]") -> None:
            if not done.cancelled() and done.exception() is None:
                self._keep(asked, wire, call_id, done.result())

        task.add_done_callback(keep)
        return StreamedAnswer(wire.events(asked.call, call_id), task, pieces, self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._texts(tuple(token_ids))


def _is_strict(tool: Any) -> bool:
    """Returns whether a client counts on calls of a tool to follow its schema, which only prescribed ones do."""
    return isinstance(tool, dict) and any(
        one.get("strict") is True for one in (tool, tool.get("function")) if isinstance(one, dict)
    )


def _role(session: RecordedSession, keys: Sequence[str]) -> str:
    """Returns the role that a client names after its session's key; empty without one."""
    for key in keys:
        own, colon, role = key.partition(":")
        if colon and own == session.key:
            if not ROLE.fullmatch(role):
                raise HttpError(
                    401,
                    "The API key names a role that is no word of at most 64 letters, digits, '-', '_' and '.': send "
                    "what task.role_key(ROLE) returns.",
                    code="invalid_api_key",
                )
            return role
    return ""


def _origin(request: Request, body: Mapping[str, Any], role: str) -> Origin:
    """Returns what identifies a request and its retries: an idempotency key, or else path and body.

    The SDKs count retries in a header. An identical request without that header is a new one, because agents ask
    several times to choose among replies, unless the client of the earlier one left before its reply.
    """
    digest = hashlib.sha256(json.dumps([request.url.path, role, body], sort_keys=True).encode()).hexdigest()
    key = request.headers.get("idempotency-key")
    retried = request.headers.get("x-stainless-retry-count", "0") != "0"
    return Origin(key=key or digest, digest=digest, is_retry=retried or key is not None)
