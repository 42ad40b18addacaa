"""Servers on real sockets: who may ask, how much, in what form, and how they start and stop."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollgrad.adapters.servers import server as server_module
from rollgrad.adapters.servers.connections import HEADER_BYTES
from rollgrad.adapters.servers.guard import MAX_JSON_DEPTH, HttpError, is_loopback, read_json
from rollgrad.adapters.servers.server import (
    TOKEN_VARIABLE,
    Server,
    create_app,
    health_route,
    read_token,
    run_server,
    serve_until_signal,
)
from rollgrad.adapters.system.blocked_loop import reporting_blocks
from rollgrad.domain.errors import ConfigurationError, EngineError

MAX_BODY = 1000


async def echo(request: Request) -> Response:
    return JSONResponse(await read_json(request))


async def broken(request: Request) -> Response:
    raise RuntimeError("the secret detail")


async def busy(request: Request) -> Response:
    raise HttpError(429, "Later.", code="queue_full", headers={"Retry-After": "1"})


async def breaks_midway(request: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        yield b"first"
        raise RuntimeError("the secret detail")

    return StreamingResponse(lines())


ROUTES = [
    Route("/echo", echo, methods=["POST"]),
    Route("/broken", broken),
    Route("/busy", busy),
    Route("/midway", breaks_midway),
    health_route(lambda: {"queued": 3}),
]


async def ask(
    scenario: Callable[[httpx2.AsyncClient], Awaitable[Any]], *, token: str | None = None, host: str = "127.0.0.1"
) -> Any:
    """Runs `scenario` with a client of a server of its own."""
    server = Server(create_app(ROUTES), host=host, token=token, name="test server", max_body=MAX_BODY)
    url = await server.start()
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            return await scenario(client)
    finally:
        await server.stop()


async def post(body: bytes, **options: Any) -> httpx2.Response:
    response = await ask(lambda client: client.post("/echo", content=body, **options))
    assert isinstance(response, httpx2.Response)
    return response


def refusal(response: httpx2.Response) -> dict[str, Any]:
    """The error, which has OpenAI's shape whatever it is."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error", "which Anthropic's has besides"
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


ID_HEADERS = ("x-request-id", "request-id")
"""The SDKs of OpenAI and of Anthropic look here for the id of a request."""


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/busy", 429), ("/broken", 500), ("/gone", 404)])
async def test_every_answer_says_the_id_of_its_request(path: str, status: int) -> None:
    async def scenario(client: httpx2.AsyncClient) -> list[httpx2.Response]:
        return [
            await client.get(path),
            await client.get(path),
            await client.get(path, headers={ID_HEADERS[0]: "mine:1"}),
        ]

    with structlog.testing.capture_logs() as logs:
        answers = await ask(scenario)
    assert {answer.status_code for answer in answers} == {status}
    ids = [[answer.headers[name] for name in ID_HEADERS] for answer in answers]
    assert all(first == second for first, second in ids)
    assert ids[0] != ids[1]
    assert ids[2][0] == "mine:1"
    assert [log["request_id"] for log in logs if log["event"] == "request_failed"] == (
        [first for first, _ in ids] if status == 500 else []
    )


@pytest.mark.parametrize("named", ["a b", "x" * 129, "\u00e4", "id\tlevel=error"])
async def test_an_id_that_does_not_belong_into_a_log_is_not_taken(named: str) -> None:
    headers = [(b"x-request-id", named.encode("latin-1"))]
    answer = await ask(lambda client: client.get("/health", headers=headers))
    assert answer.headers[ID_HEADERS[0]].startswith("req_")


async def test_json_is_read() -> None:
    body = {"text": "ä😀", "nested": [{"a": [1.5, None, True]}]}
    response = await post(json.dumps(body).encode())
    assert (response.status_code, response.json()) == (200, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": "\xff"}', "not valid Unicode"),
        (b'{"a": "\\ud800"}', "not valid Unicode"),
        (b'{"a": "\\uD800"}', "not valid Unicode"),
        (b"[1]", "not an object"),
        (b'{"a":' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"}", "levels deep"),
    ],
)
async def test_what_is_no_json_object_is_a_400(body: bytes, message: str) -> None:
    response = await post(body)
    assert response.status_code == 400
    error = refusal(response)
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")


async def test_a_compressed_body_is_refused_by_name() -> None:
    response = await post(gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert "Content-Encoding gzip" in refusal(response)["message"]
    assert (await post(b"{}", headers={"Content-Encoding": "identity"})).status_code == 200


async def test_the_deepest_and_the_widest_body_allowed() -> None:
    deep = b'{"a":' + b"[" * (MAX_JSON_DEPTH - 1) + b"]" * (MAX_JSON_DEPTH - 1) + b"}"
    assert (await post(deep)).status_code == 200
    assert (await post(b'{"a":[' + b"[]," * 100 + b"1]}")).status_code == 200


async def test_a_body_beyond_the_recursion_limit_is_a_400() -> None:
    server = Server(create_app(ROUTES), name="test server")
    url = await server.start()
    async with httpx2.AsyncClient(timeout=60) as client:
        response = await client.post(f"{url}/echo", content=b'{"a":' + b"[" * 500_000)
    await server.stop()
    assert response.status_code == 400
    assert "levels deep" in refusal(response)["message"]


async def test_a_body_too_large_is_a_413() -> None:
    fits = b'{"a":"' + b"x" * (MAX_BODY - 8) + b'"}'
    assert len(fits) == MAX_BODY
    assert (await post(fits)).status_code == 200
    response = await post(fits + b" ")
    assert response.status_code == 413
    assert refusal(response)["code"] == "request_too_large"


async def test_a_body_that_grows_too_large_is_a_413() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def scenario(client: httpx2.AsyncClient) -> httpx2.Response:
        return await client.post("/echo", content=chunks())

    response = await ask(scenario)
    assert "content-length" not in response.request.headers
    assert response.status_code == 413
    assert refusal(response)["code"] == "request_too_large"


async def test_a_body_with_two_ends_is_refused_and_what_follows_is_no_request() -> None:
    async def scenario(client: httpx2.AsyncClient) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        ends = b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
        hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + ends + hidden)
        told = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return told

    told = await ask(scenario)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert b"two ends" in told
    assert told.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("path", "header"),
    [("/health", "x" * HEADER_BYTES), ("/health?" + "x" * HEADER_BYTES, "x")],
    ids=["header", "path"],
)
async def test_a_header_that_comes_whole_and_is_too_large_is_a_431(path: str, header: str) -> None:
    response = await ask(lambda client: client.get(path, headers={"X-Long": header}))
    assert response.status_code == 431
    assert refusal(response)["code"] == "header_too_large"


async def test_a_path_with_another_slash_is_not_sent_to_the_host_that_a_proxy_names() -> None:
    answer = await ask(lambda client: client.post("/echo/", json={}, headers={"Host": "127.0.0.1"}))
    assert answer.status_code == 404
    assert "POST /echo/ is not served here" in refusal(answer)["message"]


async def test_the_token_is_asked_for_everywhere_but_at_health() -> None:
    async def scenario(client: httpx2.AsyncClient) -> list[int]:
        headers: list[dict[str, str]] = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"Authorization": "Bearer secre"},
            {"x-api-key": "wrong"},
            {"Authorization": "Bearer secret"},
            {"authorization": "bearer  secret"},
            {"x-api-key": "secret"},
            {"Authorization": "Bearer dummy", "x-api-key": "secret"},
        ]
        found = [(await client.post("/echo", json={}, headers=each)).status_code for each in headers]
        refused = await client.get("/nowhere")
        assert refused.status_code == 401, "who has no token does not learn what there is"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refusal(refused)["type"] == "authentication_error"
        assert (await client.get("/health")).json() == {"status": "ok", "queued": 3}
        return found

    assert await ask(scenario, token="secret") == [401, 401, 401, 401, 401, 200, 200, 200, 200]


async def test_no_web_site_reaches_a_loopback_server() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        for host in ("localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:80"):
            assert (await client.get("/health", headers={"Host": host})).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "[::2]", ""):
            response = await client.get("/health", headers={"Host": host})
            assert response.status_code == 421, host
            assert refusal(response)["code"] == "wrong_host"
        for origin in ("http://evil.example", "null", "http://[", "https://localhost.evil.example"):
            response = await client.post("/echo", json={}, headers={"Origin": origin})
            assert response.status_code == 403, origin
            assert refusal(response)["type"] == "permission_error"
        assert (await client.post("/echo", json={}, headers={"Origin": "http://localhost:3000"})).status_code == 200

    await ask(scenario)


async def test_requests_that_are_refused_are_logged_less_and_less_often() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        for _ in range(5):
            await client.get("/busy", headers={"Authorization": "Bearer guessed"})
        await client.get("/busy", headers={"Authorization": "Bearer right"})

    with structlog.testing.capture_logs() as logs:
        await ask(scenario, token="right")
    told = [log for log in logs if log["event"] == "refused"]
    assert [(log["status"], log["so_far"], log["client"]) for log in told] == [
        (401, count, "127.0.0.1") for count in (1, 2, 4)
    ]
    assert "guessed" not in str(told)


async def test_a_server_of_other_machines_takes_any_host() -> None:
    async def scenario(client: httpx2.AsyncClient) -> int:
        headers = {"Host": "gpu-7.example", "Authorization": "Bearer secret"}
        return (await client.post("/echo", json={}, headers=headers)).status_code

    assert await ask(scenario, token="secret", host="0.0.0.0") == 200


async def test_a_defect_is_logged_and_tells_the_client_nothing() -> None:
    with structlog.testing.capture_logs() as logs:
        response = await ask(lambda client: client.get("/broken"))
    assert response.status_code == 500
    error = refusal(response)
    assert (error["type"], error["code"]) == ("api_error", "internal_error")
    assert "secret" not in response.text
    (entry,) = [entry for entry in logs if entry["event"] == "request_failed"]
    assert (entry["path"], entry["exc_info"]) == ("/broken", True)


async def test_an_answer_that_breaks_midway_ends_the_connection() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/midway")

    with structlog.testing.capture_logs() as logs:
        await ask(scenario)
    assert [entry["event"] for entry in logs].count("request_failed") == 1


async def test_refusals_keep_their_headers() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        later = await client.get("/busy")
        assert (later.status_code, later.headers["retry-after"]) == (429, "1")
        assert refusal(later) == {
            "message": "Later.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        missing = await client.get("/nowhere")
        assert missing.status_code == 404
        assert refusal(missing)["message"] == "GET /nowhere is not served here."
        wrong = await client.get("/echo")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        refusal(wrong)

    await ask(scenario)


async def test_who_hangs_up_midway_is_no_defect() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        host, port = client.base_url.host, client.base_url.port
        assert port is not None
        _, writer = await asyncio.open_connection(host, port)
        writer.write(f"POST /echo HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9\r\n\r\n{{".encode())
        await writer.drain()
        await client.get("/health")  # the server has the other request by now
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200

    with structlog.testing.capture_logs() as logs:
        await ask(scenario)
    assert "request_failed" not in [entry["event"] for entry in logs]


async def test_stopping_lets_answers_finish() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        asked.set()
        await answer.wait()
        return JSONResponse({})

    server = Server(create_app([Route("/", slow)]), name="test server")
    url = await server.start()
    async with httpx2.AsyncClient(timeout=60) as client:
        pending = asyncio.create_task(client.get(url))
        await asked.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        answer.set()
        status = (await pending).status_code
        await stopping
        await server.stop()
        with pytest.raises(httpx2.ConnectError):
            await client.get(url)
    assert status == 200


async def test_an_answer_that_takes_too_long_for_a_stop_is_refused_in_json() -> None:
    asked = asyncio.Event()

    async def hangs(request: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        return JSONResponse({})

    server = Server(create_app([Route("/", hangs)]), name="test server", stop_seconds=0)
    url = await server.start()
    async with httpx2.AsyncClient(timeout=60) as client:
        pending = asyncio.create_task(client.get(url))
        await asked.wait()
        await server.stop()
        late = await pending
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    assert refusal(late)["code"] == "stopping"


async def test_hurrying_a_stop_ends_answers_on_their_way() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        async def hangs(request: Request) -> Response:
            asked.set()
            await asyncio.Event().wait()
            return JSONResponse({})

        server = Server(create_app([Route("/", hangs)]), name="test server")
        url = await server.start()
        async with httpx2.AsyncClient(timeout=None) as client:
            pending = asyncio.create_task(client.get(url))
            await asked.wait()
            server.stop_now()
            await server.stop()
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx2.HTTPError):
                await pending

    await asyncio.wait_for(run(), 60)


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(create_app(ROUTES), port=port, name="test server")
        with pytest.raises(ConfigurationError, match=rf"test server cannot listen on .* --port {port} .*in use"):
            await server.start()
        with pytest.raises(ConfigurationError, match=rf"--port {port} .*in use"):  # before anything is loaded
            run_server(lambda: pytest.fail("loaded"), host="127.0.0.1", port=port, token_file=None, name="test server")
    with pytest.raises(ConfigurationError, match="--port 70000"):
        await Server(create_app(ROUTES), port=70000, name="test server").start()
    with pytest.raises(ConfigurationError, match=r"--host 192\.0\.2\.1"):
        await Server(create_app(ROUTES), host="192.0.2.1", token="t", name="test server").start()


def test_a_server_ends_with_the_error_of_what_runs_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[int] = []

    async def beside() -> None:
        url = capsys.readouterr().out.split()[-1]
        async with httpx2.AsyncClient(timeout=60) as client:
            told.append((await client.get(f"{url}/health")).status_code)
        raise EngineError("All engines are dead.")

    with pytest.raises(EngineError, match="All engines are dead"):
        serve_until_signal(Server(create_app(ROUTES), name="test server"), beside=beside)
    assert told == [200]


def test_a_server_names_the_function_that_blocks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "reporting_blocks", partial(reporting_blocks, seconds=0.05))
    source = "import time\nasync def tool(told):\n    while not told():\n        time.sleep(0.01)\n"
    users: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "tools.py"), "exec"), users)

    async def beside() -> None:
        await users["tool"](lambda: any("where" in log for log in logs))
        raise EngineError("The end.")

    with structlog.testing.capture_logs() as logs, pytest.raises(EngineError, match="The end"):
        serve_until_signal(Server(create_app(ROUTES), name="test server"), beside=beside)
    (first, *_) = [log for log in logs if "where" in log]
    assert first["where"].startswith("tools.py, line")
    assert first["event"].startswith("a function blocks the server:")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.1.2", "gpu-7"])
def test_other_machines_need_a_token(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--host is .*ROLLGRAD_TOKEN or --token_file"):
        Server(create_app(ROUTES), host=host, name="test server")
    Server(create_app(ROUTES), host=host, token="secret", name="test server")


def test_loopback_hosts() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))


def test_the_token_is_read_from_the_file_else_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "from-environment")
    assert read_token(None) == "from-environment"
    path = tmp_path / "token"
    path.write_text("from-file\n")
    assert read_token(path) == "from-file"


@pytest.mark.parametrize("token", ["", " \n", "two words", "ü", "a\tb"])
def test_a_token_that_no_header_carries_is_refused(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(token, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="--token_file"):
        read_token(path)
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigurationError, match=TOKEN_VARIABLE):
        read_token(None)


def test_a_token_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_token(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="it is not text"):
        read_token(tmp_path / "binary")
