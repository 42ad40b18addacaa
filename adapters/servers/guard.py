"""Checks of every request to a rollgrad server: authorisation, size and form; and the form of errors.

Invariants: a server on the loopback interface answers no web page. Every error is `{"error": {"message", "type",
"param", "code"}}`, and an unexpected one reveals no details to the client. Every answer has the id of its request,
which the log has, too. Does not own: sockets (`server.py`).
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgrad.adapters.servers.connections import HEADER_BYTES

MAX_BODY_BYTES = 16 * 2**20
"""Largest request body by default: some four million tokens of text."""
MAX_JSON_DEPTH = 64
"""Deepest nesting of a JSON body: several times what tool schemas need, far below Python's recursion limit."""
HEALTH_PATH = "/health"
"""The only path that needs no token."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Hosts, as written in URLs, that always mean this machine."""

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""OpenAI's and Anthropic's names of statuses; any other is an `invalid_request_error` below 500, else an
`api_error`."""

REQUEST_ID = "rollgrad.request_id"
"""Key of an ASGI scope with the id of a request: the client's own `x-request-id`, or one made here."""
ID_HEADERS = ("x-request-id", "request-id")
"""Headers of an answer with that id, as the SDKs of OpenAI and of Anthropic read it."""

TOO_LARGE = "request_too_large"
"""Code of the refusal of too large a body."""

CLOSE = {"Connection": "close"}
"""Header of an answer after which nothing is read of its connection."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Ids of clients that are taken: they are written into the log."""
_SECRET = re.compile(r"^/s/[^/]*")
"""The beginning of a path with a session's key, which no log may show."""

_log = structlog.get_logger()


class HttpError(HTTPException):
    """An error for the client: HTTP `status`, a sentence, a `code` for programs, the field of the body that it is about
    (`param`, None if none is), extra `headers`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param


def error_type(error: HTTPException) -> str:
    """Returns OpenAI's and Anthropic's name of an error of this status."""
    status = error.status_code
    return ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: HTTPException) -> dict[str, Any]:
    """Returns an error body in OpenAI's form."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": error.detail, "type": error_type(error), "param": param, "code": code}}


def error_response(error: HTTPException) -> JSONResponse:
    """Returns a response with `error_body`, which is in Anthropic's form as well."""
    return JSONResponse({"type": "error", **error_body(error)}, error.status_code, headers=error.headers)


async def read_json(request: Request) -> dict[str, Any]:
    """Returns the request's body: a JSON object.

    Raises:
        HttpError: 400 if the body is no JSON object, nests deeper than MAX_JSON_DEPTH, or holds a number or text that
            cannot be passed on (NaN, half a surrogate pair); 413 if it is too large; 415 if it is compressed, for a few
            bytes may stand for gigabytes.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(
            415, f"The body has Content-Encoding {encoding[:60]}, but must be plain JSON.", code="invalid_encoding"
        )
    body = await request.body()
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None
    except UnicodeError as error:
        raise HttpError(400, f"The body is not valid Unicode: {error}.", code="invalid_json") from None
    except ValueError as error:
        raise HttpError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "The body is JSON, but not an object ({...}).", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH:
        check_depth(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def check_depth(value: Any) -> None:
    """Refuses a JSON value that nests deeper than MAX_JSON_DEPTH.

    Raises:
        HttpError: 400, it does.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        children = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> HttpError:
    return HttpError(400, f"The body nests more than {MAX_JSON_DEPTH} levels deep.", code="invalid_json")


def internal_error() -> HttpError:
    """Returns the error for the client in case of a defect."""
    return HttpError(500, "The server failed to answer; its log says why.", code="internal_error")


def stopping() -> HttpError:
    """Returns the error for the client of an answer that a server ends, because it stops, before it is whole."""
    return HttpError(503, "The server is stopping: ask again.", code="stopping", headers={"Retry-After": "1"})


class Guard:
    """ASGI middleware around every app: checks authorisation and size, and hides defects from clients.

    Args:
        host: the interface served. On a loopback one, requests must name a loopback host (any port: it may be
            forwarded) and come from no other web page, so that no site reaches the server through a browser.
        token: required in `Authorization: Bearer` or `x-api-key`, except for /health; None requires nothing.
        max_body: largest request body in bytes, declared or received; a larger one is 413.
        guarded: returns whether a path needs the token; by default all but /health do.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        max_body: int = MAX_BODY_BYTES,
        guarded: Callable[[str], bool] = lambda path: path != HEALTH_PATH,
    ) -> None:
        self._app = app
        self._hosts = LOOPBACK_NAMES | {authority(host).lower()} if is_loopback(host) else None
        self._token = None if token is None else token.encode()
        self._max_body = max_body
        self._guarded = guarded
        self._refused: Tally[int] = Tally()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":  # nothing else is served, so nothing else passes unguarded
            return
        started = False
        asked = Headers(scope=scope).get(ID_HEADERS[0], "")
        scope[REQUEST_ID] = name = asked if _ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(dict.fromkeys(ID_HEADERS, name))
            await send(message)

        try:
            try:
                self._check(scope)
            except HttpError as error:
                self._tell(error.status_code, scope)
                raise
            await self._app(scope, self._limited(scope, receive), tracked_send)
            return
        except ClientDisconnect:
            return
        except HttpError as error:
            response = error_response(error)
        except asyncio.CancelledError:  # the server ends, and has waited for the answer as long as it may
            if not started:
                await error_response(stopping())(scope, receive, tracked_send)
            raise
        except KeyboardInterrupt:
            raise
        except BaseException:  # a defect: it is logged, and not shown to the client
            path = _SECRET.sub("/s/...", scope["path"])
            _log.exception("request_failed", method=scope["method"], path=path, request_id=name)
            response = error_response(internal_error())
        if not started:
            await response(scope, receive, tracked_send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        size = len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(it) for name, it in headers.raw)
        if size > HEADER_BYTES:  # it came at once: one that comes in parts is not read to its end
            raise HttpError(
                431, f"The header is larger than {HEADER_BYTES} bytes.", code="header_too_large", headers=CLOSE
            )
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may take the other one for the body's end, and a part of the body for somebody else's request.
            raise HttpError(
                400,
                "The request has Transfer-Encoding and Content-Length, which name two ends of its body: send one.",
                code="invalid_request",
                headers=CLOSE,
            )
        if self._hosts is not None:
            if _without_port(headers.get("host", "")) not in self._hosts:
                raise HttpError(
                    421,
                    f"This server answers to {', '.join(sorted(self._hosts))} only: ask it by one of these names.",
                    code="wrong_host",
                )
            origin = headers.get("origin")
            if origin is not None and _without_port(origin.partition("://")[2]) not in self._hosts:
                raise HttpError(403, "This server answers no web page of another site.", code="wrong_origin")
        if self._token is not None and self._guarded(scope["path"]) and not self._is_authorised(headers):
            raise HttpError(
                401,
                "The token is missing or wrong: send the server's as `Authorization: Bearer TOKEN`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _tell(self, status: int, scope: Scope) -> None:
        """Logs a request that is refused unread: of each status the first, second, fourth, eighth ..., so that nobody
        without the token fills the log."""
        self._refused[status] += 1
        count = self._refused[status]
        if count & (count - 1) == 0:
            client = (scope.get("client") or ("",))[0]
            _log.warning("refused", status=status, client=client, so_far=count, request_id=scope[REQUEST_ID])

    def _is_authorised(self, headers: Headers) -> bool:
        assert self._token is not None
        # All headers are compared before any result is used, so that the time does not reveal which one was right.
        matches = [hmac.compare_digest(key.encode("latin-1"), self._token) for key in given_keys(headers)]
        return any(matches)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Returns `receive` with an error for the app, which knows what too large a body means, in its place."""
        declared = Headers(scope=scope).get("content-length", "")
        refused = declared.isdecimal() and int(declared) > self._max_body
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = {} if refused else await receive()
            size += len(message.get("body", b""))
            if refused or size > self._max_body:
                raise HttpError(413, f"The body is larger than {self._max_body} bytes.", code=TOO_LARGE)
            return message

        return limited


def given_keys(headers: Headers) -> list[str]:
    """Returns a client's keys: `Authorization: Bearer` (OpenAI's) and `x-api-key` (Anthropic's), each empty if
    absent."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server bound to `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def authority(host: str) -> str:
    """Returns a host as it is written in URLs."""
    return f"[{host}]" if ":" in host else host


def _without_port(given: str) -> str:
    name = given.partition("]")[0] + "]" if given.startswith("[") else given.partition(":")[0]
    return name.lower()
