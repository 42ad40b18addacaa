"""HTTP of the page of runs: its files, and what it asks of runs, as JSON and as server-sent events.

Invariants: nothing is written but notes; the page loads nothing from elsewhere (Content-Security-Policy); files of the
page need no token, everything below `/api` does where the server has one. Does not own: runs, and reading them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgrad.adapters.servers.guard import HttpError, read_json
from rollgrad.adapters.servers.server import Server, create_app, health_route, read_token, serve_until_signal
from rollgrad.adapters.tracking.browse.filters import EXAMPLES
from rollgrad.domain.errors import FilterError, RollgradError

PAGE_SIZE = 200
LOOK_SECONDS = 1.0
"""Time between two looks for changes while somebody listens to events."""
ALIVE_SECONDS = 15.0
"""Time after which a listener gets a comment, so that proxies keep the connection open."""
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'self' http://localhost:* "
    b"http://127.0.0.1:*",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-cache",
}
"""Headers of every answer. Notebooks on this machine may frame the page."""


class View(Protocol):
    """A run; each method returns what JSON holds, or raises a RollgradError."""

    def overview(self) -> dict[str, Any]:
        """Returns all of a run but its series and rollouts."""
        ...

    def metrics(self, since: int, names: Sequence[str], points: int) -> dict[str, Any]:
        """Returns series."""
        ...

    def findings(self) -> dict[str, Any]:
        """Returns what keeps the run from learning."""
        ...

    def trajectories(self, condition: str, sort: str, page: int, size: int) -> dict[str, Any]:
        """Returns rows of rollouts."""
        ...

    def points(self, condition: str, x: str, y: str, color: str | None) -> dict[str, Any]:
        """Returns the points of a scatter."""
        ...

    def trajectory(self, key: str) -> dict[str, Any]:
        """Returns one rollout."""
        ...

    def group(self, kind: str, step: int, group_id: int) -> dict[str, Any]:
        """Returns the rollouts of one prompt."""
        ...

    def compared(self) -> dict[str, Any]:
        """Returns the prompts of evaluations."""
        ...

    def replies_to(self, prompt_id: str) -> dict[str, Any]:
        """Returns the replies to one of these prompts."""
        ...

    def notes(self) -> dict[str, Any]:
        """Returns all notes."""
        ...

    def note(self, key: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Changes a note."""
        ...

    def rescored(self, name: str) -> dict[str, Any]:
        """Returns old and new rewards of a rescoring."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns what changes when the run does: `parts` has a value for each of its files."""
        ...


class Views(Protocol):
    """The runs that are shown."""

    def listed(self) -> dict[str, Any]:
        """Returns all runs."""
        ...

    def view(self, id: str) -> View:
        """Returns one run, or raises a RollgradError."""
        ...


def serve_ui(
    runs: Views, static: Path, *, host: str, port: int, token_file: Path | None, started: Callable[[str, bool], None]
) -> None:
    """Serves the page from the main thread until SIGTERM, as `serve_until_signal` does; `started` is called with its
    address, and whether it needs a token.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError: the address cannot be served, or other machines reach it and there is no token.
    """
    token = read_token(token_file)
    stopping = asyncio.Event()
    app = create_ui_app(runs, static, stopping)
    server = Server(app, host=host, port=port, token=token, name="page of runs", guarded=needs_token)
    serve_until_signal(server, started=lambda url: started(url, token is not None), stopping=stopping.set)


def create_ui_app(runs: Views, static: Path, stopping: asyncio.Event) -> Starlette:
    """Returns the app of the page whose files are in `static`; streams of events end when `stopping` is set."""

    def of_run(ask: Callable[[View, Request], dict[str, Any]]) -> Callable[[Request], Any]:
        return _answering(lambda request: ask(runs.view(request.path_params["run"]), request))

    async def change_note(request: Request) -> Response:
        change = await read_json(request)
        if not isinstance(change.get("key"), str):
            raise HttpError(422, "key is missing: name the rollout whose note changes.", code="invalid_note")
        key = change["key"]
        return await of_run(lambda run, _: run.note(key, change))(request)  # type: ignore[no-any-return]

    async def events(request: Request) -> Response:
        run = await run_in_threadpool(_or_error, lambda: runs.view(request.path_params["run"]))
        return StreamingResponse(_changes(run, stopping), media_type="text/event-stream")

    gets: dict[str, Callable[[View, Request], dict[str, Any]]] = {
        "": lambda run, _: run.overview(),
        "/metrics": lambda run, request: run.metrics(
            _number(request, "since", 0), _words(request, "names"), _number(request, "points", 0)
        ),
        "/findings": lambda run, _: run.findings(),
        "/trajectories": lambda run, request: run.trajectories(
            _text(request, "filter"),
            _text(request, "sort"),
            _number(request, "page", 0),
            _number(request, "size", PAGE_SIZE),
        ),
        "/points": lambda run, request: run.points(
            _text(request, "filter"),
            _text(request, "x") or "action_tokens",
            _text(request, "y") or "reward",
            _text(request, "color") or None,
        ),
        "/trajectory/{key:path}": lambda run, request: run.trajectory(request.path_params["key"]),
        "/group/{kind}/{step:int}/{group:int}": lambda run, request: run.group(
            request.path_params["kind"], request.path_params["step"], request.path_params["group"]
        ),
        "/compare": lambda run, _: run.compared(),
        "/compare/{prompt}": lambda run, request: run.replies_to(request.path_params["prompt"]),
        "/notes": lambda run, _: run.notes(),
        "/rescored/{name}": lambda run, request: run.rescored(request.path_params["name"]),
        "/state": lambda run, _: _public(run.state()),
    }
    routes: list[BaseRoute] = [
        health_route(dict),
        Route("/api/runs", _answering(lambda _: runs.listed()), methods=["GET"]),
        Route("/api/filter", _answering(lambda _: {"help": EXAMPLES}), methods=["GET"]),
        Route("/api/run/{run}/events", events, methods=["GET"]),
        Route("/api/run/{run}/notes", change_note, methods=["POST"]),
        *(Route(f"/api/run/{{run}}{path}", of_run(ask), methods=["GET"]) for path, ask in gets.items()),
        Mount("/", StaticFiles(directory=static, html=True)),
    ]
    app = create_app(routes)
    app.user_middleware.append(Middleware(_Headers))
    return app


def needs_token(path: str) -> bool:
    """Returns whether a path shows anything of a run."""
    return path.startswith("/api")


class _Headers:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((n, v) for n, v in HEADERS.items() if n not in given)]
            await send(message)

        await self._app(scope, receive, with_headers)


def _answering(ask: Callable[[Request], dict[str, Any]]) -> Callable[[Request], Any]:
    """Returns an endpoint that answers with JSON what `ask` returns, in a thread of its own."""

    async def endpoint(request: Request) -> Response:
        def answer() -> bytes:
            return json.dumps(_or_error(lambda: ask(request)), allow_nan=False, separators=(",", ":")).encode()

        return Response(await run_in_threadpool(answer), media_type="application/json")

    return endpoint


def _or_error(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except FilterError as error:
        raise HttpError(400, str(error), code="invalid_filter") from error
    except RollgradError as error:
        raise HttpError(404, str(error), code="not_found") from error


async def _changes(run: View, stopping: asyncio.Event) -> AsyncIterator[str]:
    """Yields the state of a run as events: at first, and whenever a part of it changed."""
    before: Mapping[str, Any] = {}
    silent = 0.0
    while not stopping.is_set():
        try:
            state = await run_in_threadpool(run.state)
        except RollgradError:
            return  # the run was removed
        changed = [name for name, value in state["parts"].items() if before.get(name, ()) != value]
        silent += LOOK_SECONDS
        if changed:
            before, silent = state["parts"], 0.0
            yield f"event: state\ndata: {json.dumps(_public(state) | {'changed': changed})}\n\n"
        elif silent >= ALIVE_SECONDS:
            silent = 0.0
            yield ": alive\n\n"
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_SECONDS)


def _public(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "parts"}


def _text(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _words(request: Request, name: str) -> list[str]:
    return [word for word in _text(request, name).split(",") if word]


def _number(request: Request, name: str, default: int) -> int:
    given = _text(request, name)
    if not given:
        return default
    try:
        return int(given)
    except ValueError:
        raise HttpError(400, f"{name} is {given!r}, which is no whole number.", code="invalid_number") from None
