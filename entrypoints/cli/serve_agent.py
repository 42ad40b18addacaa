"""`rollgrad serve agent`: a model with its tools behind the wires of OpenAI and Anthropic."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from rollgrad.entrypoints.composition.assistant_arguments import AssistantArguments

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App


@define(kw_only=True)
class ServeAgentArguments(AssistantArguments):
    """Serves a model with its tools: POST /v1/chat/completions (OpenAI) and /v1/messages (Anthropic).

    A request that brings tools of its own gets the model's calls; one without gets the answer, after the server has run
    its own tools. The server's address is the one line on stdout. Clients send the token as their API key.
    """

    host: str = "127.0.0.1"
    """Interface to listen on. One that other machines reach needs a token."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    token_file: Path | None = None
    """File with the token that clients must send (default: the variable ROLLGRAD_TOKEN, else none)."""
    ssl_certfile: Path | None = None
    """Certificate (PEM) to serve HTTPS with; needs --ssl_keyfile."""
    ssl_keyfile: Path | None = None
    """Private key (PEM, without a password) of --ssl_certfile."""


def serve_agent(arguments: ServeAgentArguments) -> None:
    """Serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError: a setting or the model cannot be served.
    """
    arguments.check()
    from rollgrad.adapters.servers.server import run_server

    run_server(
        lambda: _loaded_app(arguments),
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        name="agent server",
    )


@contextlib.contextmanager
def _loaded_app(arguments: ServeAgentArguments) -> "Iterator[tuple[App, int]]":
    from rollgrad.adapters.servers.agent_server import AgentServer, max_body_bytes
    from rollgrad.entrypoints.composition.assistant import load_assistant

    loaded = load_assistant(arguments)
    assistant = loaded.assistant
    try:
        app = AgentServer(assistant.service, loaded.codec, model=loaded.name, answer=assistant.answer).app()
        yield app, max_body_bytes(assistant.service.max_tokens)
    finally:
        asyncio.run(loaded.tools.aclose())
