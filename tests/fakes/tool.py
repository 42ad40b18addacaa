"""An MCP server to talk to."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

MCP_SERVER = '''
import os

import anyio
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests")


@server.tool()
async def repeat(text: str) -> str:
    """Says it again."""
    await anyio.sleep(0.001 * len(text))
    return text


@server.tool()
def fail() -> str:
    raise ValueError("hunter2")


@server.tool()
def variables() -> str:
    return " ".join(os.environ)


@server.tool()
async def hang() -> str:
    await anyio.sleep(600)
    return "late"


@server.tool()
def picture() -> list:
    return ["look:", Image(data=b"x", format="png"), "nice"]


@server.tool()
def die() -> str:
    os._exit(1)


if __name__ == "__main__":
    server.run()
'''


def mcp_command(folder: Path, python: str = sys.executable) -> str:
    """A command that starts `MCP_SERVER`; `python` are words that stand for Python."""
    script = folder / "server.py"
    script.write_text(MCP_SERVER)
    return f"{python} {script}"


class McpHttpServer:
    """`MCP_SERVER` over streamable HTTP on the loopback interface; keeps the authorizations it was sent. `old`: it
    knows the protocols before 2026 alone, which have sessions."""

    def __init__(self, port: int = 0, *, old: bool = False) -> None:
        import uvicorn
        from mcp_types.version import LATEST_MODERN_VERSION

        scope: dict[str, Any] = {"__name__": "mcp_http_server"}
        exec(MCP_SERVER, scope)
        application = scope["server"].streamable_http_app()
        self.authorizations: set[str | None] = set()

        async def record(asgi: dict[str, Any], receive: Any, send: Any) -> None:
            if asgi["type"] == "http":
                headers = dict(asgi["headers"])
                self.authorizations.add(headers[b"authorization"].decode() if b"authorization" in headers else None)
                if old and headers.get(b"mcp-protocol-version") == LATEST_MODERN_VERSION.encode():
                    await send({"type": "http.response.start", "status": 400, "headers": []})
                    await send({"type": "http.response.body"})
                    return
            await application(asgi, receive, send)

        config = uvicorn.Config(record, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/mcp"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
