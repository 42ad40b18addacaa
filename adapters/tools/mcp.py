"""Tools of an MCP server, over the official SDK.

Invariant: one task opens the connection, holds it and closes it, because the SDK's cancel scopes belong to the task
that entered them; calls come from any task of the same event loop. Does not own: the validation of arguments, which is
the server's.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, TextIO

import structlog
from attrs import field, frozen

from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.application.foreign import error_text
from rollgrad.application.rare_warning import RareWarning
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError, MissingExtraError
from rollgrad.domain.ports.environment import Tool

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

TOKEN_VARIABLE = "ROLLGRAD_MCP_TOKEN"
"""Environment variable whose value, if set, is sent to HTTP servers as a bearer token."""
URLS = ("http://", "https://")
"""Beginnings of the URLs of servers."""
CALL_SECONDS = 30.0
"""Longest wait for the result of a call."""
START_SECONDS = 120.0
"""Longest wait for a server to start and list its tools; some servers are downloaded first."""
ALIVE_SECONDS = 10.0
"""Longest time of a server to list its tools, after a call that it did not answer in time."""
CLOSE_SECONDS = 10.0
"""Longest wait for a server to end; then its process is killed."""
SESSION_HEADER = "mcp-session-id"
"""Header of requests within a session, which the protocols before 2026 have; one that the server does not know is
answered with 404."""

MOST_TOOLS = 1024
"""Most tools of a server: a model is shown all of them in each prompt."""
SDK_LOGGERS = ("mcp.client", "mcp.shared")
"""Loggers of what the SDK's clients do."""

_log = structlog.get_logger()
_server: ContextVar[str] = ContextVar("mcp_server", default="?")


class _SdkLog(logging.Handler):
    """Tells in one line, and rarely, what the SDK says of a server: it writes a traceback for each line that is no
    JSON-RPC message, which a server with a `print` on its standard output sends without end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: defaultdict[tuple[str, str, int], RareWarning] = defaultdict(RareWarning)

    def emit(self, record: logging.LogRecord) -> None:
        """Implements `logging.Handler`."""
        error = record.exc_info[1] if record.exc_info else None
        why = {} if error is None else {"error": error_text(error)}
        server = _server.get()
        told = self._told[server, record.name, record.lineno]
        told.tell("mcp_server_misbehaves", server=server, problem=record.getMessage(), **why)


_sdk_log = _SdkLog()


@frozen(kw_only=True)
class McpTool(Tool):
    """One tool of a server: name, description and parameters are the server's. `timeout` is in seconds a call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    connection: "McpTools"
    timeout: float
    _late: RareWarning = field(factory=RareWarning, init=False, eq=False, repr=False)
    _wrong: RareWarning = field(factory=RareWarning, init=False, eq=False, repr=False)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns the server's answer: its texts, those of embedded resources too, its images, and other parts by their
        kind (`[audio]`); of an answer that has structured content alone, that as JSON.

        A call that fails has a result with `is_error`: the server reports an error (wrong arguments, say), its answer
        is not the protocol's, the deadline passes, or the server ends during the call or answers nothing at all. After
        a server has ended or fallen silent, the next call starts it again.

        Raises:
            ConnectionError: the connection was closed by `McpTools.close`.
            EngineError: the server cannot be started or reached again.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self.connection.client()
        _server.set(self.connection.server)  # the SDK sends a call in the context of its caller
        try:
            async with asyncio.timeout(self.timeout) as deadline:
                result = await client.call_tool(self.name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:  # the SDK's code for its own end, and many servers' for any error
                await self.connection.check(client)
            if not self.connection.holds(client):
                text = f"The server of the tool {self.name!r} ended during the call."
                return ToolResult(content=text, is_error=True)
            return ToolResult(content=error.message, is_error=True)
        except ValueError as error:  # pydantic's: the answer is not what the protocol prescribes
            self._wrong.tell("tool_failed", tool=self.name, error=error_text(error))
            text = f"The server of the tool {self.name!r} gave an answer that cannot be read."
            return ToolResult(content=text, is_error=True)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._late.tell("tool_timed_out", tool=self.name, seconds=self.timeout)
            await self.connection.check(client)
            text = f"The tool {self.name!r} gave no answer within {self.timeout:g} s."
            return ToolResult(content=text, is_error=True)
        texts = list(map(_text, result.content))
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        images = (f"data:{part.mime_type};base64,{part.data}" for part in result.content if part.type == "image")
        return ToolResult(content="\n".join(texts), images=tuple(images), is_error=result.is_error)

    async def close(self) -> None:
        """Does nothing: `McpTools.close` closes the connection, which all tools of the server share."""


class McpTools:
    """A connection to an MCP server, made by `connect`; closes itself at the end of `async with`. If the server ends,
    the next call opens another."""

    def __init__(self, server: str, start_timeout: float) -> None:
        self.tools: Sequence[McpTool] = ()
        """The server's tools as they were when the connection opened, in its order."""
        self.server = server
        """Its command or URL."""
        self._start_timeout = start_timeout
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> "Client":
        """Returns the SDK's client; connects again if the server has ended.

        Raises:
            ConnectionError: the connection was closed.
            EngineError: the server cannot be started or reached again.
        """
        async with self._opening:
            if self._closing.is_set():
                raise ConnectionError(f"The connection to the MCP server {self.server!r} is closed.")
            if self._client is None:
                await self._end()
                try:
                    await self.open()
                except ConfigurationError as error:
                    raise EngineError(f"A server of tools has ended and did not come back: {error}") from error
            assert self._client is not None
            return self._client

    def holds(self, client: "Client") -> bool:
        """Returns whether calls still go to this client: its server has neither ended nor forgotten it."""
        return client is self._client

    def ended(self, client: "Client") -> None:
        """Records that the server of this client has ended."""
        if client is self._client:
            self._client = None
            _log.warning("mcp_server_ended", server=self.server)

    async def check(self, client: "Client") -> None:
        """Gives up a server that has ended, or that answers nothing because a call of it hangs: the next call starts or
        reaches it again."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(ALIVE_SECONDS) as deadline:
                await client.session.list_tools()
        except Exception as error:  # of many kinds, and most of them are answers
            closed = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
            if closed or deadline.expired():
                self.ended(client)

    async def open(self) -> None:
        """Connects and lists the tools, for `connect`."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        try:
            async with asyncio.timeout(self._start_timeout):
                await asyncio.wait({opened, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self._end()
            raise _refusal(self.server, f"it gave no answer within {self._start_timeout:g} s") from None
        except asyncio.CancelledError:
            await self._end()
            raise
        if not opened.done():
            error = self._task.exception()
            raise _refusal(self.server, _reason(error)) from error

    async def close(self) -> None:
        """Ends the connection, and the server if it is a process; idempotent."""
        self._closing.set()
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _end(self) -> None:
        """Ends the task of the connection; errors in closing are logged."""
        self._client = None
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None:
            _log.warning("mcp_close_failed", server=self.server, error=_reason(error))

    async def _hold(self, opened: "asyncio.Future[None]") -> None:
        """Opens, holds and closes the connection in one task, to which its cancel scopes belong."""
        _server.set(self.server)  # the SDK's tasks begin here, and have it, too
        for name in SDK_LOGGERS:
            sdk = logging.getLogger(name)
            sdk.addHandler(_sdk_log)
            sdk.propagate = False
        async with _client(self.server, self._notice) as client:
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if len(found) > MOST_TOOLS:
                    raise ValueError(f"it offers more than {MOST_TOOLS:,} tools")
                cursor = page.next_cursor
                if cursor is None:
                    break
            self.tools = self.tools or tuple(
                McpTool(
                    name=tool.name,
                    description=tool.description or "",
                    parameters=tool.input_schema,
                    connection=self,
                    timeout=CALL_SECONDS,
                )
                for tool in found
            )
            self._client = client
            opened.set_result(None)
            await self._closing.wait()

    async def _notice(self, response: "httpx2.Response") -> None:
        """Ends the connection to a server that does not know its session, as one that was started again does not."""
        asked = response.request
        forgotten = response.status_code == 404 and asked.method == "POST" and SESSION_HEADER in asked.headers
        if forgotten and self._client is not None:
            self.ended(self._client)


def check_server(server: str) -> None:
    """Checks that the program of a server that is a command line is here, without starting it.

    Raises:
        ConfigurationError: it is not, or the command line is none.
    """
    if server.startswith(URLS):
        return
    try:
        command, *_ = shlex.split(server) or [""]
    except ValueError as error:
        raise _refusal(server, str(error)) from error
    if shutil.which(command) is None:
        raise _refusal(server, "no program of this name may be run here")


def _refusal(server: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The MCP server {server!r} cannot be used ({reason}): give a command that starts one, or the http(s) URL of "
        f"one that runs (a bearer token goes into {TOKEN_VARIABLE})."
    )


async def connect(server: str, *, start_timeout: float = START_SECONDS) -> McpTools:
    """Connects to an MCP server; close the result, best by `async with await connect(...) as connection`.

    Args:
        server: an http(s) URL (streamable HTTP), or a command line, which is started as a process with the SDK's short
            list of safe environment variables and spoken to over standard input and output.
        start_timeout: seconds for connecting, and for the process to start.

    Raises:
        ConfigurationError: the server cannot be started or reached, or does not speak MCP.
        MissingExtraError: the SDK is not installed.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"The tools of {server!r} come from an MCP server, but the SDK is not installed: pip install rollgrad[mcp]"
        ) from error
    tools = McpTools(server, start_timeout)
    await tools.open()
    return tools


@asynccontextmanager
async def _client(server: str, notice: Callable[["httpx2.Response"], Awaitable[None]]) -> AsyncIterator["Client"]:
    """Yields the SDK's client of a server; `notice` is told each answer over HTTP."""
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client import stdio
    from mcp.client.streamable_http import streamable_http_client

    from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES, UNCOMPRESSED, bound_but_events
    from rollgrad.adapters.tools.bounded_lines import BoundedLines

    async with AsyncExitStack() as stack:
        if server.startswith(URLS):
            token = os.environ.get(TOKEN_VARIABLE)
            http = httpx2.AsyncClient(
                verify=trusted_certificates(),
                headers={**UNCOMPRESSED, **({"Authorization": f"Bearer {token}"} if token else {})},
                timeout=httpx2.Timeout(CALL_SECONDS, read=None),  # a stream of events may pause for long
                event_hooks={"response": [bound_but_events, notice]},
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(server, http_client=http, max_sse_event_size=ANSWER_BYTES)
            yield await stack.enter_async_context(Client(transport))
        else:
            command, *arguments = shlex.split(server) or [""]
            # A byte that is no UTF-8 would otherwise end the SDK's reader, and with it all calls.
            started = StdioServerParameters(command=command, args=arguments, encoding_error_handler="replace")
            stdio.TextReceiveStream = BoundedLines  # type: ignore[attr-defined]  # the SDK bounds no line
            # The SDK's own default is what sys.stderr was when the SDK was imported.
            errors = _stderr() or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
            yield await stack.enter_async_context(Client(stdio.stdio_client(started, errlog=errors)))


def _stderr() -> TextIO | None:
    """Returns where a process may write errors: None if there is no such file, as in some notebooks."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.fileno()  # type: ignore[union-attr]  # None without a console
            return stream
    return None


def _text(part: Any) -> str:
    """Returns what a model reads of a part of an answer."""
    if part.type == "text":
        return str(part.text)
    resource = getattr(part, "resource", None)  # embedded: a file, as many servers answer with
    return str(getattr(resource, "text", f"[{part.type}]"))


def _reason(error: BaseException | None) -> str:
    """Returns the first error that task groups wrap, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "its task ended" if error is None else error_text(error)
