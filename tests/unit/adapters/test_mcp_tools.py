"""Tools of real MCP servers, over pipes and over HTTP."""

import asyncio
import io
import os
import shlex
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.adapters.tools.mcp import TOKEN_VARIABLE, McpTool, McpTools, connect
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError, MissingExtraError
from tests.fakes.tool import McpHttpServer, mcp_command
from tests.scripts import ScriptHost


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Words that stand for Python with the imports of a server made."""
    host = ScriptHost(tmp_path_factory.mktemp("python"), ("mcp.server.mcpserver",))
    yield shlex.join(host.python())
    host.close()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest, python: str, tmp_path: Path) -> Iterator[str]:
    if request.param == "stdio":
        yield mcp_command(tmp_path, python)
    else:
        http = McpHttpServer()
        yield http.url
        http.close()


def named(connection: McpTools, name: str) -> McpTool:
    return next(tool for tool in connection.tools if tool.name == name)


async def ask(server: str, name: str, **arguments: object) -> ToolResult:
    async with await connect(server) as connection:
        return await named(connection, name).call(arguments)


async def test_the_tools_are_the_servers(server: str) -> None:
    async with await connect(server) as connection:
        assert [tool.name for tool in connection.tools] == [
            "repeat", "fail", "variables", "hang", "picture", "die"
        ]  # fmt: skip
        repeat = named(connection, "repeat")
        assert repeat.description == "Says it again."
        assert repeat.parameters["required"] == ["text"]


@pytest.mark.parametrize("console", [True, False])
async def test_a_server_starts_where_errors_go_to_no_file(
    monkeypatch: pytest.MonkeyPatch, python: str, tmp_path: Path, console: bool
) -> None:
    """As in a notebook, also if the SDK was imported there."""
    from mcp.client import stdio

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(stdio.stdio_client.__wrapped__, "__defaults__", (io.StringIO(),))  # type: ignore[attr-defined]
    if not console:
        monkeypatch.setattr(sys, "__stderr__", None)
    assert (await ask(mcp_command(tmp_path, python), "repeat", text="a")).content == "a"


async def test_parts_become_text_and_images(server: str) -> None:
    shown = ToolResult(content="look:\n[image]\nnice", images=("data:image/png;base64,eA==",))
    assert await ask(server, "picture") == shown


ANSWERS = """
import json, sys

ANSWERS = {
    "refuses": b'"error":{"code":-32000,"message":"no such file"}',
    "resource": b'"result":{"content":[{"type":"resource","resource":{"uri":"file:///a","text":"A file."}}]}',
    "structured": b'"result":{"content":[],"structuredContent":{"answer":42}}',
    "latin": b'"result":{"content":[{"type":"text","text":"caf\\xe9"}]}',
}
for line in sys.stdin:
    asked = json.loads(line)
    params = asked.get("params", {})
    told = {
        "initialize": {"protocolVersion": params.get("protocolVersion"), "capabilities": {"tools": {}},
                       "serverInfo": {"name": "answers", "version": "1"}},
        "tools/list": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ANSWERS]},
    }.get(asked["method"], {})
    if "id" in asked:
        answer = ANSWERS.get(params.get("name"), b'"result":' + json.dumps(told).encode())
        sys.stdout.buffer.write(b'{"jsonrpc":"2.0","id":%d,%s}\\n' % (asked["id"], answer))
        sys.stdout.buffer.flush()
"""


async def test_answers_of_servers_made_otherwise(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    async with await connect(f"{sys.executable} -S {tmp_path}/answers.py") as connection:
        with capture_logs() as logs:
            told = {tool.name: await tool.call({}) for tool in connection.tools}
    assert told == {
        "refuses": ToolResult(content="no such file", is_error=True),
        "resource": ToolResult(content="A file."),
        "structured": ToolResult(content='{"answer": 42}'),
        "latin": ToolResult(content="caf\ufffd"),
    }
    assert logs == [], "the code -32000 is not the server's end"


async def test_an_error_of_the_tool_is_told(server: str) -> None:
    result = await ask(server, "fail")
    assert result.is_error
    assert "fail" in result.content


async def test_a_tool_that_the_server_does_not_know_is_told(server: str) -> None:
    async def scenario() -> ToolResult:
        async with await connect(server) as connection:
            gone = McpTool(name="gone", description="", parameters={}, connection=connection, timeout=30.0)
            return await gone.call({})

    result = await scenario()
    assert result.is_error
    assert "gone" in result.content


async def test_a_call_has_a_deadline_and_the_next_one_is_answered(server: str) -> None:
    async def scenario() -> tuple[ToolResult, ToolResult]:
        async with await connect(server) as connection:
            hang = McpTool(name="hang", description="", parameters={}, connection=connection, timeout=1.0)
            late = await hang.call({})
            return late, await named(connection, "repeat").call({"text": "on"})

    with capture_logs() as logs:
        late, repeated = await scenario()
    assert [(log["event"], log["tool"], log["seconds"]) for log in logs] == [("tool_timed_out", "hang", 1.0)]
    assert late == ToolResult(content="The tool 'hang' gave no answer within 1 s.", is_error=True)
    assert repeated == ToolResult(content="on")


async def test_calls_come_from_other_tasks_and_a_cancelled_one_leaves_the_connection(server: str) -> None:
    connection = await asyncio.create_task(connect(server))
    hanging = asyncio.create_task(named(connection, "hang").call({}))
    await asyncio.sleep(0.2)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    result = await asyncio.create_task(named(connection, "repeat").call({"text": "on"}))
    await asyncio.create_task(connection.close())
    assert result == ToolResult(content="on")


async def test_a_closed_connection_says_so(server: str) -> None:
    connection = await connect(server)
    await connection.close()
    await connection.close()
    with pytest.raises(ConnectionError, match="closed"):
        await named(connection, "repeat").call({"text": "x"})


async def test_a_server_that_dies_is_started_again(python: str, tmp_path: Path) -> None:
    async with await connect(mcp_command(tmp_path, python)) as connection:
        for _ in range(2):
            died = await named(connection, "die").call({})
            assert died == ToolResult(content="The server of the tool 'die' ended during the call.", is_error=True)
            both = await asyncio.gather(*(named(connection, "repeat").call({"text": text}) for text in "xy"))
            assert both == [ToolResult(content="x"), ToolResult(content="y")]
        await named(connection, "die").call({})
        (tmp_path / "server.py").unlink()
        with pytest.raises(EngineError, match="has ended and did not come back"):
            await named(connection, "repeat").call({"text": "x"})


async def test_a_server_that_a_call_blocks_is_started_again(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgrad.adapters.tools.mcp.ALIVE_SECONDS", 1.0)
    command = mcp_command(tmp_path, python)
    script = tmp_path / "server.py"
    script.write_text(script.read_text().replace("await anyio.sleep(600)", "__import__('time').sleep(600)"))
    async with await connect(command) as connection:
        hang = McpTool(name="hang", description="", parameters={}, connection=connection, timeout=1.0)
        assert (await hang.call({})).content == "The tool 'hang' gave no answer within 1 s."
        assert await named(connection, "repeat").call({"text": "on"}) == ToolResult(content="on")


async def test_a_server_that_comes_back_at_its_address_is_used_again() -> None:
    first = McpHttpServer()
    async with await connect(first.url) as connection:
        assert await named(connection, "repeat").call({"text": "x"}) == ToolResult(content="x")
        first.close()
        lost = await named(connection, "repeat").call({"text": "x"})
        assert lost.is_error
        second = McpHttpServer(int(first.url.rpartition(":")[2].partition("/")[0]))
        assert await named(connection, "repeat").call({"text": "y"}) == ToolResult(content="y")
        second.close()


async def test_a_server_that_has_forgotten_a_session_is_asked_for_another() -> None:
    first = McpHttpServer(old=True)
    async with await connect(first.url) as connection:
        assert await named(connection, "repeat").call({"text": "x"}) == ToolResult(content="x")
        first.close()
        second = McpHttpServer(int(first.url.rpartition(":")[2].partition("/")[0]), old=True)
        assert (await named(connection, "repeat").call({"text": "x"})).is_error
        assert await named(connection, "repeat").call({"text": "y"}) == ToolResult(content="y")
        second.close()


async def test_a_process_ends_with_its_connection_and_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    note = tmp_path / "pid"
    command = mcp_command(tmp_path)
    script = tmp_path / "server.py"
    script.write_text(f"import os; open({str(note)!r}, 'w').write(str(os.getpid()))\n{script.read_text()}")
    result = await ask(command, "variables")
    assert "PATH" in result.content
    assert "MY_SECRET" not in result.content
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.parametrize("token", [None, "hunter2"])
async def test_http_servers_get_the_bearer_token(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    server = McpHttpServer()
    await ask(server.url, "repeat", text="x")
    server.close()
    assert server.authorizations == {f"Bearer {token}" if token else None}


async def test_sessions_share_the_certificates_that_they_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted_certificates()
    loaded: list[str] = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda _, *paths, **named: loaded.append("again"))
    server = McpHttpServer()
    await ask(server.url, "repeat", text="x")
    server.close()
    assert not loaded


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("", "Permission denied|No such file"),
        ("'open", "No closing quotation"),
        ("/no/such/program", "No such file"),
        (f"{sys.executable} -c pass", "Connection closed"),
        (f"{sys.executable} -c 'import time; time.sleep(60)'", "no answer within 2 s"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
async def test_a_server_that_is_none_is_a_configuration_error(server: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await connect(server, start_timeout=2.0 if "sleep" in server else 120.0)


async def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtraError, match=r"rollgrad\[mcp\]"):
        await connect("server")


CARELESS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, answer = asked["method"], {"content": [{"type": "text", "text": "fine"}]}
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        who = {"name": "s", "version": "1"}
        answer = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": who}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {}}
        answer = {"tools": [{"name": name, "inputSchema": schema} for name in ("talk", "wrong")]}
    elif method != "tools/call":
        answer = None
    elif asked["params"]["name"] == "wrong":
        answer = {"contents": 5}
    else:
        print("Listening ...\\n" * 5, end="")
    said = {"error": {"code": -32601, "message": "no"}} if answer is None else {"result": answer}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)
"""


async def test_a_server_that_writes_other_lines_is_told_of_rarely_and_without_tracebacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "careless.py"
    script.write_text(CARELESS)
    command = f"{sys.executable} {script}"
    with capture_logs() as logs:
        async with await connect(command) as connection:
            assert await named(connection, "talk").call({}) == ToolResult(content="fine")
            wrong = await named(connection, "wrong").call({})
            assert await named(connection, "talk").call({}) == ToolResult(content="fine")
    problem = "The server of the tool 'wrong' gave an answer that cannot be read."
    assert wrong == ToolResult(content=problem, is_error=True)
    misbehaved = [log for log in logs if log["event"] == "mcp_server_misbehaves"]
    assert [log["times"] for log in misbehaved] == [1, 2, 4, 8]  # of ten lines
    assert {log["server"] for log in misbehaved} == {command}
    assert "Listening" in misbehaved[0]["error"]
    assert [log["tool"] for log in logs if log["event"] == "tool_failed"] == ["wrong"]
    assert "Traceback" not in capfd.readouterr().err


ENDLESS = CARELESS.replace('("talk", "wrong")', '("talk", "endless")').replace(
    """["name"] == "wrong":
        answer = {"contents": 5}""",
    """["name"] == "endless":
        while True:
            print("x" * 2**20, end="")""",
)


async def test_a_message_without_end_ends_its_server_which_starts_again(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with capture_logs() as logs:
        async with await connect(f"{sys.executable} {script}") as connection:
            endless, talk = (named(connection, name) for name in ("endless", "talk"))
            text = "The server of the tool 'endless' ended during the call."
            assert await endless.call({}) == ToolResult(content=text, is_error=True)
            assert await talk.call({}) == ToolResult(content="fine")
    (told,) = [log for log in logs if log["event"] == "mcp_server_misbehaves" and "stdout failed" in log["problem"]]
    assert "a message has more than 16,777,216 characters" in told["error"]
