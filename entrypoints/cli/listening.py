"""Starts a command's server where its flags say."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App


class Listening(Protocol):
    """Flags that all commands have which serve."""

    host: str
    port: int
    token_file: Path | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None


def serve(
    load: "Callable[[], AbstractContextManager[tuple[App, int]]]", arguments: Listening, name: str, **how: Any
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
