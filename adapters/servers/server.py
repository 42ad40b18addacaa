"""Common parts of rollgrad's HTTP servers: a guarded socket, JSON errors, tokens, a health route.

Invariant: a server that other machines can reach requires a token. Apps are served without lifespan events and
WebSockets: the caller starts and stops what an app needs. Does not own: the form of requests (`guard.py`), routes.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from rollgrad.adapters.servers.connections import (
    HEADER_BYTES,
    IDLE_SECONDS,
    WAITING_CONNECTIONS,
    BoundedProtocol,
    accepted_at_once,
)
from rollgrad.adapters.servers.guard import (
    HEALTH_PATH,
    MAX_BODY_BYTES,
    Guard,
    HttpError,
    authority,
    error_response,
    internal_error,
    is_loopback,
)
from rollgrad.adapters.system.blocked_loop import reporting_blocks
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import ConfigurationError

App = ASGIApp
"""Type of the apps that `run_server` serves."""

TOKEN_VARIABLE = "ROLLGRAD_TOKEN"
"""Environment variable with the token that clients must send; a flag would show it to every user of the machine."""
STOP_SECONDS = 10.0
"""Longest wait for unfinished answers when a server stops."""

_log = structlog.get_logger()


def create_app(routes: Sequence[BaseRoute]) -> Starlette:
    """Returns a Starlette app over `routes` whose errors are JSON."""

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not isinstance(error, HttpError):  # 404 and 405 of the router
            sentence = f"{request.method} {request.url.path} is not served here."
            error = HTTPException(error.status_code, sentence, error.headers)
        return error_response(error)

    def defect(request: Request, error: Exception) -> Response:
        return error_response(internal_error())  # Starlette raises it again, and the guard logs it

    app = Starlette(routes=routes, exception_handlers={HTTPException: refused, Exception: defect})
    # Behind a proxy a redirect, made of the request's Host, would send the client with its request to its own machine.
    app.router.redirect_slashes = False
    return app


def health_route(facts: Callable[[], Mapping[str, Any]]) -> Route:
    """Returns the route `GET /health`, which needs no token: `{"status": "ok"}` and the items of `facts`."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **facts()})

    return Route(HEALTH_PATH, health, methods=["GET"])


def read_token(token_file: Path | None) -> str | None:
    """Returns the token of `token_file`, else that of ROLLGRAD_TOKEN, else None. White space around it is left out.

    Raises:
        ConfigurationError: the file cannot be read, or the token is empty or not printable ASCII in one word.
    """
    if token_file is not None:
        source = f"--token_file {token_file}"
        try:
            token = token_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text, or that is no name of a file"
            raise ConfigurationError(
                f"{source} cannot be read ({reason}): name a file that holds the token."
            ) from error
    else:
        source = TOKEN_VARIABLE
        variable = os.environ.get(TOKEN_VARIABLE)
        if variable is None:
            return None
        token = variable
    token = token.strip()
    if not (token.isascii() and token.isprintable() and token and " " not in token):
        raise ConfigurationError(f"The token of {source} must be one word of printable ASCII: put a secret there.")
    return token


def check_exposure(host: str, token: str | None, name: str) -> None:
    """Refuses a server that other machines reach without a token.

    Raises:
        ConfigurationError: `host` is not a loopback interface, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host is {host!r}, where other machines reach the {name}, but no token protects it: set "
            f"{TOKEN_VARIABLE} or --token_file, or leave --host out."
        )


@frozen
class Tls:
    """Files of a server's certificate (with those that it depends on) and its private key, both PEM, the key without a
    password."""

    certfile: Path
    keyfile: Path

    @classmethod
    def of(cls, certfile: Path | None, keyfile: Path | None) -> "Tls | None":
        """Returns the pair after checking both files; None if neither is set.

        Raises:
            ConfigurationError: one is missing, or they are not a certificate and its key.
        """
        if certfile is None and keyfile is None:
            return None
        if certfile is None or keyfile is None:
            lacking, given = ("certfile", "keyfile") if certfile is None else ("keyfile", "certfile")
            raise ConfigurationError(f"--ssl_{given} is set, but --ssl_{lacking} is not: TLS needs both.")
        with foreign_code(
            lambda words: ConfigurationError(
                f"--ssl_certfile {certfile} and --ssl_keyfile {keyfile} cannot be used ({words}): give a certificate "
                "and its key as PEM files, the key without a password."
            )
        ):
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile, password="")
        return cls(certfile, keyfile)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the caller handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """An app behind a `Guard` on one socket, inside a running event loop. `url` is its address once started.

    Args:
        host: interface to bind.
        port: 0 picks a free one.
        token: secret that clients must send (`Guard`).
        name: name of the server, in the log and in errors.
        max_body: largest request body in bytes (`Guard`).
        tls: certificate and key; None serves plain HTTP.
        guarded: paths that need the token (`Guard`).
        stop_seconds: longest wait for unfinished answers when it stops.
        bound: socket that has the address already, from `bind`; None takes it when the server starts.

    Raises:
        ConfigurationError: other machines could reach the server, and there is no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        name: str,
        max_body: int = MAX_BODY_BYTES,
        tls: "Tls | None" = None,
        guarded: Callable[[str], bool] = lambda path: path != HEALTH_PATH,
        stop_seconds: float = STOP_SECONDS,
        bound: socket.socket | None = None,
    ) -> None:
        check_exposure(host, token, name)
        self.url: str | None = None
        self._host, self._port, self._name, self._bound = host, port, name, bound
        self._scheme = "http" if tls is None else "https"
        self._server = _EmbeddedServer(
            uvicorn.Config(
                Guard(app, host=host, token=token, max_body=max_body, guarded=guarded),
                http=BoundedProtocol,
                timeout_keep_alive=IDLE_SECONDS,
                backlog=accepted_at_once(),  # asyncio accepts so many in a row
                h11_max_incomplete_event_size=HEADER_BYTES,
                ssl_certfile=None if tls is None else str(tls.certfile),
                ssl_keyfile=None if tls is None else str(tls.keyfile),
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,  # the guard logs errors of an app
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(stop_seconds),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serves until `stop`; returns the address, `http(s)://HOST:PORT`. Call it once.

        Raises:
            ConfigurationError: the address is taken, or not this machine's.
        """
        bound = self._bound or bind(self._host, self._port, self._name)
        try:
            with _address(self._host, self._port, self._name):
                bound.listen()  # another that has the address may have begun to listen
        except ConfigurationError:
            bound.close()
            raise
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        self.url = f"{self._scheme}://{authority(self._host)}:{bound.getsockname()[1]}"
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.001)
        bound.listen(WAITING_CONNECTIONS)  # in the kernel more may wait than are accepted in a row
        _log.info("server_started", name=self._name, url=self.url)
        return self.url

    async def stop(self) -> None:
        """Stops accepting requests, waits `stop_seconds` for unfinished answers, and ends the rest; idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    def stop_now(self) -> None:
        """Ends the wait of a running `stop`."""
        self._server.should_exit = self._server.force_exit = True


def bind(host: str, port: int, name: str) -> socket.socket:
    """Returns a socket with the address of a server, which listens as soon as that starts; until then connections are
    refused.

    Raises:
        ConfigurationError: another server listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # no address that was not named
        with _address(host, port, name):
            bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _address(host: str, port: int, name: str) -> Iterator[None]:
    """Turns errors of the block into one that names the flags."""
    try:
        yield
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"The {name} cannot listen on --host {host} --port {port} ({reason}): choose another, or --port 0 for any "
            "free one."
        ) from error


def run_server(
    load: Callable[[], contextlib.AbstractContextManager[tuple[ASGIApp, int]]],
    *,
    host: str,
    port: int,
    token_file: Path | None,
    name: str,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
    guarded: Callable[[str], bool] = lambda path: path != HEALTH_PATH,
    stop_seconds: float = STOP_SECONDS,
    beside: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves an app from the main thread until SIGTERM, then returns; a second signal ends unfinished answers.

    The server's address, once it answers requests, is the one line on stdout, for scripts.

    Args:
        load: makes the app, which may take a while; gives it with the size in bytes of its largest request, and ends it
            once the server has stopped. It is not called for a server that must not run, or has no address.
        host, port, name: of the server, as in `Server`.
        token_file: file of the token, as in `read_token`.
        ssl_certfile, ssl_keyfile: certificate and key, as in `Tls.of`.
        guarded, stop_seconds: as in `Server`.
        beside: as in `serve_until_signal`.

    Raises:
        KeyboardInterrupt: SIGINT, after the server has stopped.
        ConfigurationError: `Server`, `bind`, `read_token` or `Tls.of` refuse a setting.
    """
    token = read_token(token_file)
    check_exposure(host, token, name)
    tls = Tls.of(ssl_certfile, ssl_keyfile)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bind(host, port, name))
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the address alone, not for prints of libraries
            app, max_body = stack.enter_context(load())
        server = Server(
            app,
            host=host,
            port=port,
            token=token,
            name=name,
            max_body=max_body,
            tls=tls,
            guarded=guarded,
            stop_seconds=stop_seconds,
            bound=bound,
        )
        serve_until_signal(server, beside=beside)


def serve_until_signal(
    server: Server,
    *,
    started: Callable[[str], None] = lambda url: None,
    stopping: Callable[[], None] = lambda: None,
    beside: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves from the main thread until SIGTERM, then returns; a second signal ends unfinished answers. The server's
    address is the one line on stdout.

    Args:
        server: is started and stopped here.
        started: is called with the address after that.
        stopping: is called before the server waits for unfinished answers, to end those that have no end.
        beside: is run beside the server, in its event loop; an error of it ends the server, and is raised.

    Raises:
        KeyboardInterrupt: SIGINT, after the server has stopped.
        ConfigurationError: the address cannot be served.
    """
    received: list[signal.Signals] = []

    async def serve() -> None:
        stop = asyncio.Event()

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            stop.set()
            if len(received) > 1:
                server.stop_now()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        url = await server.start()
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        started(url)
        stopped, other = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(_endless(beside))
        with reporting_blocks("server"):  # a tool of the user's
            await asyncio.wait({stopped, other}, return_when=asyncio.FIRST_COMPLETED)
        stopping()
        await server.stop()
        if other.done():
            other.result()

    asyncio.run(serve())
    if received[0] == signal.SIGINT:
        raise KeyboardInterrupt


async def _endless(work: Callable[[], Awaitable[None]] | None) -> None:
    """Does `work`, and never returns."""
    if work is not None:
        await work()
    await asyncio.Event().wait()
