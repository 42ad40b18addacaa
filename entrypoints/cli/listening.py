"""Starts a command's server where its flags say."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App


@define(kw_only=True, slots=False)
class ListeningArguments:
    """Flags of commands that serve."""

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


def serve(
    load: "Callable[[], AbstractContextManager[tuple[App, int]]]", arguments: ListeningArguments, name: str, **how: Any
) -> None:
    """Serves an app where the flags say, until SIGTERM; `load`, `name` and `how` are as for `run_server`.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError: a flag cannot be served.
    """
    from rollgrad.adapters.servers.server import run_server

    run_server(
        load,
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        name=name,
        **how,
    )
