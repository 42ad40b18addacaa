"""`rollgrad serve agent`: a model with its tools behind the wires of OpenAI and Anthropic."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.cli.listening import ListeningArguments, serve
from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App


@define(kw_only=True)
class ServeAgentArguments(ListeningArguments, AssistantArguments):
    """Serves a model with its tools: POST /v1/chat/completions, /v1/responses, /v1/completions (OpenAI), /v1/messages
    (Anthropic); GET /health and /ready (without a token), /metrics (Prometheus).

    A request that brings tools of its own gets the model's calls; one without gets the answer, after the server has run
    its own tools. The server's address is the one line on stdout. Clients send the token as their API key.
    """

    client_requests: int | None = None
    """Requests of one client (an address) answered at the same time, more are refused; default: no limit."""
    drain_seconds: int = 30
    """Longest wait for unfinished answers after SIGTERM."""
    follow: Path | None = None
    """Output directory of a run: its newest checkpoint (step_N, and model of its end) is loaded whenever there is
    another, and by POST /reload."""

    def check(self) -> None:
        """Refuses wrong settings, before anything is loaded.

        Raises:
            ConfigurationError: one is missing or out of range.
        """
        super().check()
        for name, least in (("client_requests", 1), ("drain_seconds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"--{name} is {value}, but it must be {least} or more.")
        if self.follow is not None and not self.follow.is_dir():
            raise ConfigurationError(f"--follow {self.follow} is no directory: name the output directory of a run.")
        if self.follow is not None and self.engine is Engine.SERVER:
            raise ConfigurationError(
                "--follow is set, but --engine is server, whose weights others bring: leave it out."
            )


def serve_agent(arguments: ServeAgentArguments) -> None:
    """Serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError: a setting or the model cannot be served.
        EngineError: no engine will ever serve again.
    """
    arguments.check()
    import asyncio

    from rollgrad.adapters.servers.operation import needs_token

    besides: list[Callable[[], Awaitable[None]]] = []

    async def beside() -> None:
        await asyncio.gather(*(work() for work in besides))

    serve(
        lambda: _loaded_app(arguments, besides),
        arguments,
        "agent server",
        guarded=needs_token,
        stop_seconds=arguments.drain_seconds,
        beside=beside,
    )


@contextlib.contextmanager
def _loaded_app(
    arguments: ServeAgentArguments, besides: list[Callable[[], Awaitable[None]]]
) -> "Iterator[tuple[App, int]]":
    """Loads the app; adds to `besides` what runs beside its server."""
    import asyncio

    from rollgrad.adapters.servers.agent_server import AgentServer, max_body_bytes
    from rollgrad.adapters.servers.operation import Operation
    from rollgrad.entrypoints.composition.serving.assistant import load_assistant

    loaded = load_assistant(arguments, follow=arguments.follow)
    assistant = loaded.assistant
    try:
        reload = loaded.reload
        operation = Operation(
            assistant.service,
            client_requests=arguments.client_requests,
            reload=None if reload is None else reload.reload,
            loaded=None if reload is None else reload.loaded,
            check=loaded.check,
        )
        server = AgentServer(
            assistant.service, loaded.codec, model=loaded.name, answer=assistant.answer, operation=operation
        )
        if arguments.follow is not None and reload is not None:
            besides.append(reload.keep_following)
        if loaded.until_hopeless is not None:
            besides.append(loaded.until_hopeless)
        # An image has more bytes than the tokens that stand for it could have as text.
        yield server.app(), max_body_bytes(None if assistant.sees_images else assistant.service.max_tokens)
    finally:
        asyncio.run(loaded.aclose())
