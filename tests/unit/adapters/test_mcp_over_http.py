"""MCP over HTTP: answers take no more memory than they may, and mistakes of a server are told with its name."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES
from rollgrad.adapters.tools.mcp import McpTool, connect
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError

TOOLS = ("fine", "large", "packed", "picture", "page", "moved")
LARGE = ANSWER_BYTES + 1


class _Server(BaseHTTPRequestHandler):
    """Answers each tool in its own way; `pages` lists tools without end."""

    protocol_version = "HTTP/1.1"
    pages = False
    accepted: set[str]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.accepted.add(self.headers["Accept-Encoding"])
        if "id" not in asked:
            self._send(202, b"")
            return
        name = asked.get("params", {}).get("name")
        if name == "moved":
            self._send(307, b"", Location="http://169.254.169.254/latest/meta-data")
            return
        method = asked["method"]
        said = {"result": self._results().get(method if name is None else name)}
        if said["result"] is None:
            said = {"error": {"code": -32601, "message": "no"}}
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}).encode()
        if name == "packed":
            self._send(200, gzip.compress(body), **{"Content-Type": "application/json", "Content-Encoding": "gzip"})
        elif name == "picture":
            self._send(200, b"data: " + body + b"\n\n", **{"Content-Type": "text/event-stream"})
        else:
            self._send(200, body, **{"Content-Type": "text/html" if name == "page" else "application/json"})

    def do_GET(self) -> None:
        self._send(405, b"")

    def _results(self) -> dict[str, Any]:
        names = [f"t{number}" for number in range(500)] if self.pages else TOOLS
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        version = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        return {
            "initialize": {**version, "serverInfo": {"name": "s", "version": "1"}},
            "tools/list": {"tools": tools, **({"nextCursor": "more"} if self.pages else {})},
            "large": {"content": [{"type": "text", "text": "x" * LARGE}]},
            "picture": {"content": [{"type": "image", "mimeType": "image/png", "data": "A" * 2_000_000}]},
            **{name: {"content": [{"type": "text", "text": name}]} for name in ("fine", "packed", "page")},
        }

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def handler() -> type[_Server]:
    return type("Handler", (_Server,), {"accepted": set()})


@pytest.fixture
def url(handler: type[_Server]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
        server.shutdown()
        thread.join()


async def test_an_answer_that_is_too_large_fails_its_call_alone(url: str, handler: type[_Server]) -> None:
    async with await connect(url) as connection:
        tools = {tool.name: tool for tool in connection.tools}
        client = await connection.client()
        large, packed = await tools["large"].call({}), await tools["packed"].call({})
        assert await tools["fine"].call({}) == ToolResult(content="fine")
        assert connection.holds(client), "the other calls of the connection go on"
    assert large.is_error
    assert "it has more than 16,777,216 bytes" in large.content
    assert packed.is_error
    assert "compressed (gzip)" in packed.content
    assert handler.accepted == {"identity"}


async def test_a_large_image_in_an_event_is_shown(url: str) -> None:
    """Most servers answer with events, of which the SDK reads one MiB by default."""
    async with await connect(url) as connection:
        shown = await {tool.name: tool for tool in connection.tools}["picture"].call({})
    assert shown == ToolResult(content="[image]", images=(f"data:image/png;base64,{'A' * 2_000_000}",))


@pytest.mark.parametrize(("name", "problem"), [("page", "Unexpected content type"), ("moved", "not followed")])
async def test_what_a_server_does_wrong_in_a_call_is_logged_with_its_name(url: str, name: str, problem: str) -> None:
    async with await connect(url) as connection:
        tool: McpTool = {tool.name: tool for tool in connection.tools}[name]
        with capture_logs() as logs:
            assert (await tool.call({})).is_error
    told = [(log["server"], problem in log["problem"]) for log in logs if log["event"] == "mcp_server_misbehaves"]
    assert told == [(url, True)]


async def test_a_list_of_tools_without_end_is_refused(url: str, handler: type[_Server]) -> None:
    handler.pages = True
    with pytest.raises(ConfigurationError, match="more than 1,024 tools"):
        await connect(url, start_timeout=60.0)
