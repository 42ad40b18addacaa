"""`rollgrad serve agent`: a model with its tools behind the wires of OpenAI and Anthropic."""

import asyncio
import contextlib
import sys
from pathlib import Path

from attrs import define

from rollgrad.entrypoints.assistant import AssistantArguments

NAME = "agent server"


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


def serve_agent(arguments: ServeAgentArguments) -> None:
    """Serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError: a setting or the model cannot be served.
    """
    arguments.check()
    from rollgrad.adapters.http.serving import check_exposure, read_token, run_server

    token = read_token(arguments.token_file)
    check_exposure(arguments.host, token, NAME)  # before the model, which takes a while
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        from rollgrad.adapters.http.agent_server import AgentServer
        from rollgrad.entrypoints.assistant_factory import load_assistant

        loaded = load_assistant(arguments)
    server = AgentServer(loaded.assistant.service, loaded.codec, model=loaded.name, answer=loaded.assistant.answer)
    try:
        run_server(server.app(), host=arguments.host, port=arguments.port, token=token, name=NAME, print_url=True)
    finally:
        asyncio.run(loaded.tools.aclose())
