"""The operation of a server: counts in Prometheus' format, a log of requests, readiness, and a limit
per client.

Invariant: neither the log nor the counts hold anything of a request but its route, its status, its size in tokens and,
in the log, its id.
"""

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import structlog
from attrs import frozen
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgrad.adapters.servers.guard import (
    HEALTH_PATH,
    REQUEST_ID,
    HttpError,
    error_response,
    internal_error,
    stopping,
)
from rollgrad.adapters.servers.wire import usage_of
from rollgrad.application.episodes.chat_service import ChatService
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.errors import EngineError, RollgradError

METRICS_PATH, READY_PATH, RELOAD_PATH = "/metrics", "/ready", "/reload"
Reload = Callable[[], Awaitable[Mapping[str, Any]]]
Check = Callable[[], Awaitable[None]]
CHECK_SECONDS = 5.0
"""Longest time of an engine to say that it lives; one that computes a long prompt answers between two steps."""
CLIENT_LEFT = 499
"""Status of an answer whose client went away before its end."""
OUTCOME = "rollgrad.outcome"
"""Key of an ASGI scope with the status of the error with which an answer ended that had begun well."""
BEGUN = "rollgrad.begun"
"""Key of an ASGI scope with the time of the request, until the first piece of its answer is counted."""
TOKENS = "rollgrad.tokens"
"""Key of an ASGI scope with the tokens of an answer, for the log."""
PROBES = (HEALTH_PATH, METRICS_PATH, READY_PATH)
"""Paths that are asked all the time, and neither logged nor counted."""


def needs_token(path: str) -> bool:
    """Returns whether a client of an operated server needs the token; who starts and stops it asks without one."""
    return path not in (HEALTH_PATH, READY_PATH)


BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds of the histogram of seconds: replies take from parts of a second to minutes."""

_log = structlog.get_logger()


@frozen(kw_only=True)
class Loaded:
    """Which `checkpoint` an engine has, how often another one took its place (`reloads`), and how often that failed."""

    checkpoint: str
    reloads: int
    failures: int


class Operation:
    """Observes one server.

    Args:
        service: answers; a server whose service takes no more requests is not ready.
        client_requests: requests of one client (an address) that are answered at the same time, more are refused; None
            for no limit.
        reload: loads the newest checkpoint and says which it is, for `POST /reload`; None where there is no such route.
        loaded: says which checkpoint is loaded; None where there is one for ever.
        check: returns normally if the engine can serve requests, and raises `EngineError` otherwise; None for one that
            cannot fail by itself.
    """

    def __init__(
        self,
        service: ChatService,
        *,
        client_requests: int | None = None,
        reload: Reload | None = None,
        loaded: Callable[[], Loaded] | None = None,
        check: Check | None = None,
    ) -> None:
        self._service = service
        self._reload = reload
        self._loaded = loaded
        self._check = check
        self._limit = client_requests
        self._clients: Tally[str] = Tally()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rollgrad_requests", "Requests answered, by path and status.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "rollgrad_request_seconds",
            "Seconds from a request to its answer's end.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._first = Histogram(
            "rollgrad_first_token_seconds",
            "Seconds from a request that streams to the first piece of its answer.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._tokens = Counter("rollgrad_tokens", "Tokens read and sampled, by kind.", ["kind"], registry=registry)
        in_flight = Gauge("rollgrad_requests_in_flight", "Requests that are being answered.", registry=registry)
        in_flight.set_function(lambda: service.in_flight)
        if loaded is not None:
            reloads = Gauge("rollgrad_reloads", "Checkpoints that took the place of another.", registry=registry)
            reloads.set_function(lambda: loaded().reloads)
            failures = Gauge("rollgrad_reload_failures", "Checkpoints that could not be loaded.", registry=registry)
            failures.set_function(lambda: loaded().failures)

    def facts(self) -> Mapping[str, Any]:
        """Returns what `GET /health` says of the checkpoint."""
        if self._loaded is None:
            return {}
        loaded = self._loaded()
        return {"checkpoint": loaded.checkpoint, "reloads": loaded.reloads}

    def routes(self) -> list[BaseRoute]:
        """Returns the routes `GET /metrics` and `GET /ready`, 503 while no request would be taken or served."""

        async def metrics(request: Request) -> Response:
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

        async def ready(request: Request) -> Response:
            status = await self._status()
            return JSONResponse({"status": status}, 200 if status == "ready" else 503)

        routes: list[BaseRoute] = [
            Route(METRICS_PATH, metrics, methods=["GET"]),
            Route(READY_PATH, ready, methods=["GET"]),
        ]
        if self._reload is not None:
            routes.append(Route(RELOAD_PATH, self._reloaded, methods=["POST"]))
        return routes

    async def _status(self) -> str:
        """Returns `ready`, or why no request would be answered: `busy`, or `failed` of an engine. Its error is told to
        requests alone, which have a token."""
        if self._service.full:
            return "busy"
        try:
            if self._check is not None:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._check()
        except (EngineError, TimeoutError):
            return "failed"
        return "ready"

    async def _reloaded(self, request: Request) -> Response:
        assert self._reload is not None
        # A client that goes away must not leave the engine with half of the weights.
        loading = asyncio.ensure_future(self._reload())
        try:
            return JSONResponse(dict(await asyncio.shield(loading)))
        except RollgradError as error:
            raise HttpError(503, str(error), code="not_reloaded") from error

    def count(self, replies: Sequence[ChatReply], choices: int, scope: Scope) -> None:
        """Counts the tokens of the replies to one request, `choices` to each prompt in turn, which has this scope."""
        prompt, sampled = usage_of(replies, choices)
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("reply").inc(sampled)
        scope[TOKENS] = {"prompt_tokens": prompt, "reply_tokens": sampled}

    def count_first(self, scope: Scope) -> None:
        """Counts the time to the first piece of a streamed answer, once for the request that has this scope."""
        begun = scope.pop(BEGUN, None)
        if begun is not None:
            self._first.observe(time.monotonic() - begun)

    def around(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        """Returns `app`, observed; other paths than these are counted together."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in PROBES:
                await app(scope, receive, send)
                return
            status, whole = 200, False

            async def heard(message: Message) -> None:
                nonlocal status, whole
                if message["type"] == "http.response.start":
                    status = message["status"]
                whole = message["type"] == "http.response.body" and not message.get("more_body")
                await send(message)

            client, begun = (scope.get("client") or ("",))[0], time.monotonic()
            self._clients[client] += 1
            scope[BEGUN] = begun
            try:
                full = self._limit is not None and self._clients[client] > self._limit
                if full and scope["path"] != RELOAD_PATH:  # the operator may reload a full server
                    await error_response(self._busy())(scope, receive, heard)
                else:
                    await app(scope, receive, heard)
                status = scope.get(OUTCOME, status) if whole else CLIENT_LEFT
            except ClientDisconnect:
                status = CLIENT_LEFT
                raise
            except asyncio.CancelledError:
                status = stopping().status_code
                raise
            except BaseException:  # the guard turns it into an answer
                status = internal_error().status_code
                raise
            finally:
                self._clients -= Tally([client])  # removes clients without requests
                path = scope["path"] if scope["path"] in paths else "other"
                self._tell(scope, path, status, time.monotonic() - begun)

        return observed

    def _busy(self) -> HttpError:
        told = f"This client has {self._limit} requests in flight, the most that it may have: try again."
        return HttpError(429, told, code="busy", headers={"Retry-After": "1"})

    def _tell(self, scope: Scope, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.observe(seconds)
        told = {"status": status, "seconds": round(seconds, 3), **scope.get(TOKENS, {})}
        _log.info("request", method=scope["method"], path=path, **told, request_id=scope.get(REQUEST_ID))
